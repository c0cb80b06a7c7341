"""Which runs benchmarks/experiments makes, most important first: per experiment a claim, settings, and rows.

A row is a label with a mechanism, and whatever else differs from the other rows. To add a mechanism to an experiment,
add a row; one whose mechanism is not there is left out until it is. Settings are those of `subquad train`.
"""

from typing import Any

from jobs import Experiment, Row

LINEAR_FAR = {"mechanism": "linear"}
# Rotary positions, the default, turn queries and keys. Where features are few, adding positions to the embedding is a
# better way to learn where to look, and is what the papers on linear attention did.
LEARNED = {"positions": "learned"}


def performer(count: int, **options: Any) -> dict[str, Any]:
    return {"mechanism": "performer", "num_features": count, **options}


def lsh(rounds: int, size: int = 32) -> dict[str, Any]:
    return {"mechanism": "lsh", "rounds": rounds, "buckets": size, "bucket_size": size}


def multipole(chunk: int, clusters: int, exact: int) -> dict[str, Any]:
    """Chunks shorter than the sequence: within one everything is exact, and nothing would be approximated."""
    return {"mechanism": "multipole", "chunk": chunk, "clusters": clusters, "exact_keys": exact}


def hybrid(window: int, far: Any) -> dict[str, Any]:
    return {"mechanism": "hybrid", "window": window, "sinks": 4, "far": far}


def after_window(mechanism: Any) -> list[Any]:
    """Two layers: an exact window of 4 tokens, which joins a key and the value after it, then the mechanism, which has
    to find the pair again."""
    return [{"mechanism": "local", "window": 4}, mechanism]


IMAGES = {"layers": 4, "heads": 4, "dim": 128}
TEXT = {"layers": 6, "heads": 4, "dim": 256}
SMALL_TEXT = {"layers": 4, "heads": 4, "dim": 192}
PROTEIN = {"layers": 6, "heads": 4, "dim": 128}
SPEECH = {"layers": 3, "heads": 2, "dim": 64}
DOCUMENTS = {"layers": 2, "heads": 2, "dim": 64}

PROTEIN_ROWS = {
    "softmax": Row("softmax"),
    "performer-relu": Row(performer(64, features="relu")),
    "performer-softmax": Row(performer(64)),
}


def documents(length: int) -> Experiment:
    softmax = {
        1024: {"softmax": Row("softmax")},
        4096: {"softmax": Row("softmax", seeds=1)},
        16384: {},  # it would take hours
    }
    return Experiment(
        name=f"documents-{length}",
        claim="long documents: the more of one is read, the better; mechanisms of linear time make it cheap",
        task="documents",
        data="documents",
        options={"length": length, "stretch": 1024, "share": 0.55},
        rows={
            **softmax[length],
            "linear": Row("linear"),
            "performer-64": Row(performer(64)),
            "multipole": Row(multipole(512, 24, 128), seeds=1 if length > 4096 else None),
        },
        model=DOCUMENTS,
        settings={"steps": 600, "batch": 4, "lr": 2e-3, "warmup": 50, "valid_every": 100, "valid_examples": 256},
        seeds=3,
    )


EXPERIMENTS = (
    Experiment(
        name="mnist",
        claim="MNIST pixel by pixel: softmax 0.621, linear 0.644, lsh-4 0.676, lsh-1 0.745 bits/dim",
        task="images",
        data="mnist",
        rows={
            "softmax": Row("softmax"),
            # At the others' rate the loss of linear jumps late in the training, and it ends no better.
            "linear": Row("linear", settings={"lr": 1e-3}),
            "linear-learned": Row("linear", model=LEARNED),
            "performer-64": Row(performer(64), settings={"lr": 1e-3}),
            "lsh-1": Row(lsh(1)),
            "lsh-4": Row(lsh(4), later=1),
            "hybrid": Row(hybrid(32, LINEAR_FAR)),
            "multipole": Row(multipole(128, 8, 64)),
        },
        model=IMAGES,
        settings={"steps": 1200, "batch": 8, "lr": 2e-3, "warmup": 50, "valid_every": 150, "valid_examples": 128},
        seeds=3,
    ),
    Experiment(
        name="text",
        claim="text, causal, 2048 bytes: performer with redraw matches softmax, lsh does not; linear time pays",
        task="text",
        data="enwik8",
        options={"length": 2048},
        rows={
            "softmax": Row("softmax", seeds=1),  # one seed where a run takes more than 20 minutes
            "performer-256": Row(performer(256)),
            "performer-256-redrawn": Row(performer(256), settings={"redraw_every": 100}),
            "hybrid": Row(hybrid(64, LINEAR_FAR)),
            "multipole": Row(multipole(256, 16, 128)),
            "linear": Row("linear"),
            "linear-learned": Row("linear", model={**LEARNED, "max_length": 2048}),
            "lsh-4": Row(lsh(4, 64), later=1),
        },
        model=TEXT,
        settings={"steps": 800, "batch": 2, "lr": 1e-3, "warmup": 100, "valid_every": 100, "valid_examples": 24},
        seeds=3,
    ),
    Experiment(
        name="masked",
        claim="masked text: linformer, which has no causal form, and lsh lose to performer (Choromanski et al.)",
        task="text",
        data="enwik8",
        options={"length": 512, "masked": True},
        rows={
            "softmax": Row("softmax"),
            "performer-256": Row(performer(256)),
            "linformer-64": Row({"mechanism": "linformer", "length": 512, "rank": 64}),
            "lsh-4": Row(lsh(4)),
            "multipole": Row(multipole(128, 8, 64)),
        },
        model=SMALL_TEXT,
        settings={"steps": 1000, "batch": 4, "lr": 1e-3, "warmup": 50, "valid_every": 100, "valid_examples": 64},
        seeds=3,
    ),
    Experiment(
        name="pretrained",
        claim="weights of a softmax model carry over to performer after a short fine-tuning (Choromanski et al.)",
        task="text",
        data="enwik8",
        options={"length": 512},
        rows={
            "softmax": Row("softmax", settings={"steps": 4000, "valid_every": 500}, seeds=1),
            **{
                f"performer-{features}": Row(performer(features), start="pretrained/softmax")
                for features in (256, 64, 1024)
            },
            "hybrid": Row(hybrid(64, performer(64)), start="pretrained/softmax"),
            "multipole": Row(multipole(128, 8, 64), start="pretrained/softmax"),
            # Features fitted to the queries and keys of the softmax model, before the first step.
            "performer-256-calibrated": Row(
                performer(256, features="sderf", center=True, antithetic=True), start="pretrained/softmax"
            ),
            "performer-256-from-scratch": Row(performer(256)),
            # As long as the softmax model, at the better of two rates (400 steps): does it ever come there? And is it
            # the rate that the others lack?
            "performer-256-as-long": Row(
                performer(256), settings={"steps": 4000, "lr": 3e-3, "valid_every": 500}, seeds=1
            ),
            "performer-256-higher-rate": Row(performer(256), settings={"lr": 3e-3}, start="pretrained/softmax"),
            "softmax-higher-rate": Row(
                "softmax", settings={"steps": 4000, "lr": 3e-3, "valid_every": 500}, seeds=1, later=1
            ),
        },
        model=SMALL_TEXT,
        settings={"steps": 1000, "batch": 4, "lr": 5e-4, "warmup": 50, "valid_every": 50, "valid_examples": 64},
        seeds=3,
    ),
    Experiment(
        name="recall",
        claim="a state of fixed size holds a limited number of pairs, softmax any (Arora et al.)",
        task="recall",
        options={"length": 64, "pairs": 16},
        rows={
            "softmax": Row(after_window("softmax")),
            "taylor": Row(after_window("taylor")),
            "linear": Row(after_window("linear")),
            "performer-256": Row(after_window(performer(256))),
            "multipole": Row(after_window(multipole(16, 4, 8))),
            "hedgehog": Row(after_window("hedgehog")),
            "taylor-16": Row(after_window("taylor"), model={"head_dim": 16}),
            "performer-64": Row(after_window(performer(64))),
            "hybrid": Row(after_window(hybrid(16, LINEAR_FAR))),
            "efficient": Row(after_window("efficient")),
            "local-16": Row(after_window({"mechanism": "local", "window": 16})),
            # Without that window: the same mechanism in both layers.
            "softmax-alone": Row("softmax"),
            "linear-alone": Row("linear"),
            "taylor-alone": Row("taylor"),
            "hybrid-taylor-alone": Row(hybrid(16, "taylor")),
        },
        model={},
        settings={"steps": 1500, "valid_every": 125, "precision": "no"},
        seeds=3,
    ),
    Experiment(
        name="protein-masked",
        claim="proteins, both directions: performer with relu features is at least as good as softmax",
        task="protein",
        data="protein.fasta.gz",
        options={"length": 512},
        rows=PROTEIN_ROWS,
        model=PROTEIN,
        settings={"steps": 1500, "batch": 8, "lr": 1e-3, "warmup": 100, "valid_every": 100, "valid_examples": 128},
        seeds=3,
    ),
    Experiment(
        name="protein-causal",
        claim="proteins, left to right: performer with relu features is at least as good as softmax",
        task="protein",
        data="protein.fasta.gz",
        options={"length": 512, "causal": True},
        rows=PROTEIN_ROWS,
        model=PROTEIN,
        settings={"steps": 1500, "batch": 8, "lr": 1e-3, "warmup": 100, "valid_every": 100, "valid_examples": 128},
        seeds=3,
    ),
    Experiment(
        name="protein-36-layers",
        claim="36 reversible layers train (Choromanski et al.)",
        task="protein",
        data="protein.fasta.gz",
        options={"length": 512},
        rows={"performer-relu": PROTEIN_ROWS["performer-relu"]},
        model={"layers": 36, "heads": 2, "dim": 64, "reversible": True},
        settings={"steps": 400, "batch": 4, "lr": 1e-3, "warmup": 100, "valid_every": 50, "valid_examples": 64},
    ),
    Experiment(
        name="speech",
        claim="speech, 400 to 2400 frames: linear is within 20 % of softmax and faster; BiLSTM is worse",
        task="speech",
        data="fsdd/recordings",
        options={"fewest": 8, "digits": 40, "stride": 1, "nearby": 0},
        rows={
            "softmax": Row("softmax", seeds=1),  # 20 minutes each
            "linear": Row("linear"),
            "performer-64": Row(performer(64)),
            "lsh-4": Row(lsh(4)),
            "clustered": Row({"mechanism": "clustered", "clusters": 100}),
            "improved-clustered": Row({"mechanism": "improved-clustered", "clusters": 100}),
            "multipole": Row(multipole(256, 16, 64)),
            "linear-nearby": Row("linear", options={"nearby": 2}),
            "softmax-nearby": Row("softmax", options={"nearby": 2}, seeds=1),
            "linear-window": Row(hybrid(16, LINEAR_FAR)),
            # In the time that softmax takes for its steps: is it within 20 % then?
            "linear-nearby-as-long": Row(
                "linear", options={"nearby": 2}, settings={"steps": 6000, "valid_every": 600}, seeds=1
            ),
            "bilstm": Row("bilstm"),
        },
        model=SPEECH,
        settings={"steps": 1500, "batch": 4, "lr": 3e-3, "warmup": 100, "valid_every": 150, "valid_examples": 64},
        seeds=3,
    ),
    Experiment(
        name="copy",
        claim="copying 32 symbols: linear attention with 16 features reaches 100 % (Katharopoulos et al., with RAdam)",
        task="copy",
        rows={
            "adamw": Row("linear"),
            "radam": Row("linear", settings={"optimizer": "radam"}),
            "adam": Row("linear", settings={"optimizer": "adam"}),
            "lion": Row("linear", settings={"optimizer": "lion", "lr": 3e-4}),
        },
        model={},
        settings={"steps": 6000, "lr": 1e-3, "valid_every": 500, "precision": "no"},
        seeds=3,
    ),
    Experiment(
        name="cifar10",
        claim="CIFAR-10 pixel by pixel, 3072 values: linear attention trains where softmax is slow",
        task="images",
        data="cifar10",
        # Half an hour of one core each, as the steps were timed: what a mechanism gains in steps counts.
        rows={
            "softmax": Row("softmax", settings={"steps": 1400, "valid_every": 140}),
            "multipole": Row(multipole(256, 16, 128), settings={"steps": 2800, "valid_every": 280}),
            "linear-learned": Row("linear", model=LEARNED, settings={"steps": 6000, "valid_every": 600}),
        },
        model=IMAGES,
        settings={"batch": 2, "lr": 1e-3, "warmup": 100, "valid_examples": 16},
    ),
    Experiment(
        name="redraw",
        claim="redrawing the features while training helps (Choromanski et al.)",
        task="text",
        data="enwik8",
        options={"length": 256},
        rows={
            "fixed": Row(performer(64)),
            "every-20": Row(performer(64), settings={"redraw_every": 20}),
            "every-100": Row(performer(64), settings={"redraw_every": 100}),
            "every-500": Row(performer(64), settings={"redraw_every": 500}),
        },
        model={"layers": 3, "heads": 4, "dim": 128},
        settings={"steps": 1500, "batch": 8, "lr": 1e-3, "warmup": 100, "valid_every": 250, "valid_examples": 128},
        seeds=3,
    ),
    documents(1024),
    documents(4096),
    documents(16384),
)
