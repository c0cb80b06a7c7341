"""`convert`: replace the attention of a pretrained model, keep its weights, and say what that costs.

Everything is built, calibrated and measured first and put in place at the end, so that an error leaves the model as
it was. What was done is written into config.json when the model is saved (attachment.py), and loading reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

from ... import checks
from ...mechanisms import MECHANISMS, Mechanism, create
from ..plan.candidates import SDERF
from .attachment import attach, detach, forget, saved_config
from .capturing import LayerSample, capture, select_layers
from .checking import StandIn, disagreements, look
from .choice import Assignment, assign, leave_exact, needs_calibration, with_sample
from .interface import mechanism_of
from .layers import AttentionLayer, known_layers
from .placement import device_of
from .positions import learned_positions
from .report import ConversionReport, Errors, LayerReport, total_tokens
from .trials import Trial, make_trials

if TYPE_CHECKING:
    from ..plan.automatic import Chosen

__all__ = ["convert", "revert"]

Model = TypeVar("Model", bound=nn.Module)


def _batches(calibration: Iterable[Any] | None, model: Any) -> list[Any]:
    if calibration is None:
        return []
    if isinstance(calibration, (Mapping, torch.Tensor, str)):
        raise TypeError(
            "calibration must be an iterable of batches, each a dict of tensors as the model takes them, got a single "
            f"{type(calibration).__name__}; put it into a list"
        )
    batches = list(calibration)
    if _is_sentence_encoder(model):
        batches = [dict(model.tokenize([one])) if isinstance(one, str) else one for one in batches]
    # What a tokenizer gives is a mapping, but not one that torch's pytrees look into.
    batches = [dict(one) if isinstance(one, Mapping) else one for one in batches]
    if not batches:
        raise ValueError(
            "calibration is empty: at least one batch is needed, a dict of tensors as the model takes them"
        )
    limit = learned_positions(model)
    for number, batch in enumerate(batches):
        _check_batch(number, batch)
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if limit is not None and isinstance(tokens, torch.Tensor) and tokens.shape[1] > limit:
            raise ValueError(
                f"calibration[{number}] has {tokens.shape[1]} tokens, and the model has learned {limit} positions: cut "
                f"the texts, tokenizer(..., truncation=True, max_length={limit}), or pass a SentenceTransformer with "
                "positions='interpolate'"
            )
    return batches


def _check_batch(number: int, batch: Any) -> None:
    """Refuse what a tokenizer gives without return_tensors="pt": lists, arrays, one text without its batch."""
    if not isinstance(batch, Mapping):
        tensors = any(isinstance(one, torch.Tensor) for one in batch) if isinstance(batch, tuple | list) else False
        if not isinstance(batch, torch.Tensor) and not tensors:
            how = "texts are tokenized first"
            if isinstance(batch, tuple | list):
                how = "token ids are a batch of one as {'input_ids': torch.tensor([ids])}"
            raise TypeError(
                f"calibration[{number}] must be a dict of tensors as the model takes them, a tuple of tensors or a "
                f"tensor, got {type(batch).__name__}; {how}"
            )
        return
    for name, value in batch.items():
        if isinstance(value, (list, np.ndarray)):
            raise TypeError(
                f"calibration[{number}][{name!r}] must be a tensor, got {type(value).__name__}; tokenizers give "
                'tensors with return_tensors="pt"'
            )
    ids = batch.get("input_ids")
    if isinstance(ids, torch.Tensor) and ids.dim() > 1 and not ids.numel():
        raise ValueError(f"calibration[{number}]['input_ids'] has the shape {tuple(ids.shape)}: it holds no token")
    if isinstance(ids, torch.Tensor) and ids.dim() < 2:
        raise ValueError(
            f"calibration[{number}]['input_ids'] must have shape (batch, length), got {tuple(ids.shape)}; one text is "
            "a batch of one: input_ids[None]"
        )


def _calibrate(mechanism: Mechanism, sample: LayerSample) -> None:
    for q, k, _, key_mask in sample.calls():
        mechanism.calibrate(q, k, key_mask=key_mask, query_mask=sample.query_mask(key_mask))


def _gather(model: nn.Module, assignments: Sequence[Assignment], batches: Sequence[Any]) -> None:
    """Calibrate what has statistics to gather."""
    needy = {a.layer.index: a for a in assignments if a.mechanism is not None and needs_calibration(a.mechanism)}
    if not needy:
        return
    if not batches:
        name = next(a.mechanism.name for a in needy.values() if a.mechanism is not None)
        raise ValueError(
            f"{name!r} as configured learns means or scales from sample data: pass calibration=, an iterable of "
            "batches as the model takes them (a few hundred tokens are enough), or --calibrate on the command line"
        )
    for batch in batches:
        for sample in capture(model, [batch], layers=list(needy)):
            mechanism = needy[sample.layer].mechanism
            assert mechanism is not None
            _calibrate(mechanism, sample)
    for assignment in needy.values():
        assert assignment.mechanism is not None
        if needs_calibration(assignment.mechanism):
            raise ValueError(
                f"the calibration batches never reach attention layer {assignment.layer.index} "
                f"({assignment.layer.name}), or hold padding only; give batches that run the whole model"
            )


def _measure(model: nn.Module, assignments: Sequence[Assignment], batches: Sequence[Any]) -> ConversionReport:
    """Errors of every converted layer on the exact model's own queries, keys and values."""
    errors = {a.layer.index: Errors(a.layer, a.mechanism) for a in assignments if a.mechanism is not None}
    tokens = 0
    for batch in batches:
        samples = capture(model, [batch], layers=list(errors))
        tokens += total_tokens(samples)
        for sample in samples:
            errors[sample.layer].add(sample)
    rows = []
    for assignment in assignments:
        index, mechanism = assignment.layer.index, assignment.mechanism
        numbers = errors[index].relative() if index in errors else {}
        what = None if mechanism is None else saved_config(mechanism)
        rows.append(LayerReport(index, assignment.layer.name, what, assignment.reason, **numbers))
    return ConversionReport(tuple(rows), len(batches), tokens)


def convert(
    model: Model,
    mechanism: Any = None,
    layers: Iterable[int | str] | None = None,
    calibration: Iterable[Any] | None = None,
    *,
    error: float | None = None,
    check: bool = True,
    length: int | None = None,
    positions: str | None = None,
    candidates: Sequence[Mapping[str, Any]] | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> tuple[Model, ConversionReport]:
    """Replace the attention of `model`, in place, and report what it costs: (model, report).

    model:       any transformers model whose layers call the attention interface, or a module made of
                 torch.nn.MultiheadAttention (nn.TransformerEncoder, ...)
    mechanism:   a name ("performer"), {"mechanism": name, **options}, a `Mechanism` object (each layer gets one of its
                 kind), a function of the layer, or one choice per layer: a list, or a mapping from numbers or names,
                 None for "leave it exact". "hybrid" with calibration takes the best far field, none where that is
                 better. Without one, the fastest is chosen for every layer and head at which the model's output stays
                 within `error` on batches of `calibration` that are held out for it; it may be that nothing should be
                 converted at that length, which the report then says
    error:       where no mechanism is named, of the model's output (0.01): 1 - cosine of the last hidden state, or of
                 logits the larger of their relative squared error and three times the divergence of what they predict.
                 With "multipole" its own option, of each layer's output
    length:      tokens that the choice is made for; None = those of the longest batch
    layers:      numbers or names of the attention layers to convert; None = all that can be
    calibration: batches as the model takes them (dicts of tensors; texts for a SentenceTransformer). Needed by
                 mechanisms with centring or SDERF features; where given, the report has each layer's error on them
    check:       try the conversion out first, on the first batch or on one made from the config: with exact attention
                 in the converted path the model must give what it gives. A layer for which it does not stays exact,
                 with the difference in the report, or raises if it was asked for by name
    positions:   "interpolate": let a SentenceTransformer with learned positions encode texts of up to `length` tokens
    candidates:  where no mechanism is named: dicts to choose from, like {"mechanism": "local", "window": 64}
    resume:      where no mechanism is named: a file that keeps what was measured, for the same call to go on from
    progress:    called with (what, how many are done, of how many) while a mechanism is chosen
    options:     of the mechanism; `seed` is mixed with the layer's number, so that no two layers draw alike

    The exact model is what "softmax" gives. `revert(model)` undoes it, `model.save_pretrained(folder)` keeps it and
    `load(folder)` brings it back. Decoders generate with a state per converted layer in their cache afterwards, of
    constant size where the mechanism's `constant_memory` is True. Masks that a mechanism cannot express are refused by
    name, when the model is called with one.

    >>> import torch, subquad as sq
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, batch_first=True), 2).eval()
    >>> x = torch.randn(2, 10, 32)
    >>> model, report = sq.hf.convert(model, "performer", calibration=[x], num_features=64, seed=0)
    >>> report.converted, model(x).shape
    ([0, 1], torch.Size([2, 10, 32]))
    >>> model = sq.hf.revert(model)
    """
    if not isinstance(model, nn.Module):
        how = ": load it first, transformers.AutoModel.from_pretrained(...)" if isinstance(model, str) else ""
        raise TypeError(f"model must be a torch module, got {type(model).__name__}{how}")
    _check_positions(model, positions, length)
    if mechanism is not None:
        if length is not None and positions is None:
            raise ValueError(
                f"length={length} is for choosing a mechanism, and {mechanism!r} is named; leave one of them out"
            )
        for argument, value in (("candidates", candidates), ("resume", resume)):
            if value is not None:
                raise ValueError(f"{argument}= is for choosing a mechanism, and {mechanism!r} is named; leave it out")
        if error is not None:
            options = {**_with_error(mechanism, error), **options}
    else:
        options = {"candidates": candidates, "resume": resume, "progress": progress, **options}
    given = (mechanism, layers, calibration, 0.01 if error is None else error, check, length, options)
    if positions is None:
        with _not_compiled(model) as inner:
            return model, _convert(inner, *given)
    from . import sentences

    assert length is not None
    _refuse_converted(model)  # whose positions are not this call's to restore
    note = sentences.allow_longer_texts(model, length)  # first: what is calibrated with may be as long
    report = None
    try:
        report = _convert(model, *given)
    finally:
        if report is None or not report.converted:
            sentences.restore_length(model)
    return model, replace(report, notes=(*report.notes, note)) if report.converted else report


@contextmanager
def _not_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """The model inside torch.compile's wrapper, run as it is. Afterwards what was compiled is compiled anew: graphs do
    not notice that the config and the hooks of a module have changed."""
    if not any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
        yield model
        return
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield inner
    finally:
        torch.compiler.reset()


def _convert(
    model: nn.Module,
    mechanism: Any,
    wanted: Iterable[int | str] | None,
    calibration: Iterable[Any] | None,
    error: float,
    check: bool,
    length: int | None,
    options: dict[str, Any],
) -> ConversionReport:
    layers = _refuse_converted(model)
    batches = _batches(calibration, model)
    own = mechanism == "softmax"  # every layer goes on with its own function: there is nothing to find out
    trials = make_trials(model, batches) if check and not own else []
    if trials:
        layers, trials = look(model, layers, trials)
    elif batches and not own:
        seen = {sample.layer: sample for sample in capture(model, batches[:1])}
        layers = [with_sample(layer, seen.get(layer.index)) for layer in layers]
    choice: Chosen | None = None
    if mechanism is None:
        choice, assignments = _choose(model, layers, trials, batches, wanted, error, length, options)
        if not any(assignment.mechanism is not None for assignment in assignments):
            rows = tuple(LayerReport(a.layer.index, a.layer.name, None, a.reason) for a in assignments)
            return ConversionReport(rows, len(batches), choice=choice)
    else:
        assignments = assign(layers, mechanism, wanted, _with_far(mechanism, options, batches))
    for assignment in assignments:
        if assignment.mechanism is not None:
            _move(assignment.mechanism, assignment.layer.module)
    approximate = _approximate(assignments)
    if check and approximate and choice is None:
        _check_trials(model, layers, trials)
        assignments = leave_exact(disagreements(model, approximate, trials), assignments)
    _gather(model, assignments, batches)
    report = replace(_measure(model, assignments, batches), choice=choice)
    worse = {row.layer for row in report.layers if row.mechanism is not None and _far_is_worse(row)}
    if worse and mechanism == "hybrid":
        assignments = [_window_alone(a) if a.layer.index in worse else a for a in assignments]
        report = replace(_measure(model, assignments, batches), notes=(_WORSE.format(sorted(worse)),))
    # From here on nothing can fail.
    for assignment in assignments:
        if assignment.mechanism is not None:
            attach(model, assignment.layer, assignment.mechanism)
    if _is_sentence_encoder(model):
        from . import sentences

        sentences.mark_converted(model)
    return report


def _refuse_converted(model: nn.Module) -> list[AttentionLayer]:
    """The layers of a model that is not converted yet."""
    layers = known_layers(model)
    for layer in layers:
        mechanism = mechanism_of(layer.module)
        if mechanism is not None:
            raise ValueError(
                f"the model is converted already (attention layer {layer.index} is {mechanism.name!r}); call "
                "subquad.hf.revert(model) first"
            )
    return layers


def _approximate(assignments: Sequence[Assignment]) -> list[tuple[AttentionLayer, Mechanism]]:
    """The layers that are to get an approximation, and which."""
    return [(a.layer, a.mechanism) for a in assignments if a.mechanism is not None and not a.mechanism.exact]


def _with_error(mechanism: Any, error: float) -> dict[str, Any]:
    """`error` as an option of the mechanism that is named, or a refusal: ignored, it would look as if it were kept."""
    name = mechanism.get("mechanism") if isinstance(mechanism, Mapping) else mechanism
    kind: Any = MECHANISMS.get(name) if isinstance(name, str) else name
    if not (isinstance(kind, type) and issubclass(kind, Mechanism) and "error" in kind.options()):
        raise ValueError(
            f"error={error!r} applies where no mechanism is named, or to 'multipole'; mechanism={mechanism!r} has no "
            "error target: leave it out, and see the report's errors"
        )
    return {"error": error}


_WORSE = "layers {}: their far field is worse than none on the calibration batches, so they have the window alone"


def _with_far(mechanism: Any, options: Mapping[str, Any], batches: Sequence[Any]) -> dict[str, Any]:
    """The options of "hybrid" with the best far field that calibration allows, where none is named, and with the seed
    where it belongs: nothing else of it is drawn."""
    if mechanism != "hybrid":
        return dict(options)
    near, far = {name: x for name, x in options.items() if name not in ("far", "seed")}, options.get("far")
    seed = {"seed": options["seed"]} if "seed" in options else {}
    if far is None and batches:
        return {**near, "far": {**SDERF, "num_features": 256, "per_head": True, "seed": 0, **seed}}
    if not seed:
        return dict(options)
    if isinstance(far, Mechanism) or (isinstance(far, Mapping) and "seed" in far):
        raise ValueError(f"seed={options['seed']!r} is that of far=, which has one of its own; leave one of them out")
    return {**near, "far": {**(far if isinstance(far, Mapping) else {"mechanism": far or "performer"}), **seed}}


def _far_is_worse(row: LayerReport) -> bool:
    return row.error is not None and row.window_only is not None and row.error > row.window_only


def _window_alone(assignment: Assignment) -> Assignment:
    one: Any = assignment.mechanism
    near = create("local", one.head_dim, one.heads, one.kv_heads, window=one.window, sinks=one.sinks)
    _move(near, assignment.layer.module)
    return replace(assignment, mechanism=near)


def _choose(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    trials: Sequence[Trial],
    batches: Sequence[Any],
    wanted: Iterable[int | str] | None,
    error: float,
    length: int | None,
    options: Mapping[str, Any],
) -> tuple[Chosen, list[Assignment]]:
    """What is chosen, of layers whose converted path is what the model does: the choice says what the whole model
    gives with all of them."""
    from ..plan.automatic import choose_mechanisms

    if not batches:
        raise ValueError(
            "without a mechanism one is chosen for each layer, by what it does to the model's output: pass "
            "calibration=, a "
            "few batches as the model takes them, or name a mechanism"
        )
    asked = {layer.index for layer in select_layers(layers, wanted)}
    layers = [layer if layer.index in asked else replace(layer, obstacle="not asked for") for layer in layers]
    stand_ins = [(x, StandIn(x.head_dim)) for x in layers if not x.obstacle and x.head_dim is not None]
    wrong = disagreements(model, stand_ins, trials) if trials else {}
    while True:
        layers = [replace(layer, obstacle=wrong.get(layer.index, layer.obstacle)) for layer in layers]
        choice = choose_mechanisms(model, layers, batches, error=error, length=length, **options)
        assignments = [
            Assignment(x, one, "" if one is not None else x.obstacle or "chosen to stay exact")
            for x, one in ((layer, choice.mechanisms.get(layer.index)) for layer in layers)
        ]
        # Once more with what they are: mechanisms that choose for several queries at once are told of padding.
        wrong = disagreements(model, _approximate(assignments), trials) if trials else {}
        if not wrong:
            return choice, assignments


def _is_sentence_encoder(model: nn.Module) -> bool:
    """Whether sentence-transformers made it, asked without importing that."""
    return any(kind.__module__.startswith("sentence_transformers.") for kind in type(model).__mro__)


def _check_positions(model: nn.Module, positions: str | None, length: int | None) -> None:
    if positions is None:
        return
    checks.check_option("positions", positions, ("interpolate",))
    if length is None or not _is_sentence_encoder(model):
        raise ValueError(
            "positions='interpolate' needs a SentenceTransformer and length=, the longest text in tokens, got "
            f"{type(model).__name__} and length={length}"
        )


def _check_trials(model: nn.Module, layers: Sequence[AttentionLayer], trials: Sequence[Trial]) -> None:
    if not trials and not all(isinstance(layer.module, nn.MultiheadAttention) for layer in layers):
        raise ValueError(
            f"no input for {type(model).__name__} could be made from its config, so the conversion cannot be checked: "
            "pass calibration=, a list with at least one batch as the model takes it, or check=False"
        )


def _move(mechanism: Mechanism, module: nn.Module) -> None:
    mechanism.to(device_of(module))
    mechanism.train(module.training)


def revert(model: Model) -> Model:
    """Undo `convert`: the mechanisms are removed, the model computes exact attention again. Returns the model.

    >>> import torch, subquad as sq
    >>> model = torch.nn.MultiheadAttention(32, 4)
    >>> model, _ = sq.hf.convert(model, "linear")
    >>> type(sq.hf.revert(model)).__name__
    'MultiheadAttention'
    """
    with _not_compiled(model) as inner:
        found = [layer for layer in known_layers(inner) if mechanism_of(layer.module) is not None]
        if not found:
            raise ValueError(f"{type(inner).__name__} is not converted: there is nothing to revert")
        for layer in found:
            detach(inner, layer)
        forget(inner)
        if _is_sentence_encoder(inner):
            from .sentences import restore_length

            restore_length(inner)
    return model
