"""`powerguard seal`: make the checkpoint that another framework wrote safe against a power cut."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from powerguard.cli.render import Bar, Paint, amount, clean
from powerguard.cli.shared import EX_REFUSED, fail, whole

if TYPE_CHECKING:
    from powerguard.trainer.seal.folder import Sealed


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Flush a checkpoint folder of any framework and write SEAL.json into it: names, sizes and "
        "digests of all files. After a power cut, `powerguard checkpoints verify` shows whether a sealed folder is "
        "complete, or what is not. To seal an unchanged folder again has no effect. Exit 0: sealed and durable; 1: "
        "not."
    )
    parser.add_argument("folder", metavar="DIR", nargs="+", help="one checkpoint's folder; may be several")
    parser.add_argument("--again", action="store_true", help="seal a changed folder as it is now")
    parser.add_argument(
        "--step", type=whole(example=1200), metavar="N", help="its training step (default: from its name)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from powerguard.trainer.seal.folder import seal
    from powerguard.trainer.seal.manifest import SealError

    done: list[Sealed] = []
    with Bar("sealing", quiet=args.json) as bar:
        for folder in args.folder:
            try:
                done.append(seal(folder, again=args.again, step=args.step, progress=bar.renamed("sealing")))
            except (SealError, OSError) as error:
                if not args.json and done:
                    _print_sealed(done)
                return fail(args, "seal", _why(error, folder), EX_REFUSED)
    if args.json:
        print(json.dumps(_object(done), indent=2))
    else:
        _print_sealed(done)
    return 0


def _why(error: Exception, folder: str) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or folder}: {error.strerror or error}; there is no new seal"
    return str(error)


def _print_sealed(done: "list[Sealed]") -> None:
    paint = Paint(sys.stdout)
    for each in done:
        step = "" if each.seal.step is None else f"step {each.seal.step}, "
        count = len(each.seal.files)
        what = f"{step}{count} file{'' if count == 1 else 's'}, {amount(each.seal.size_bytes)}"
        word = paint("sealed", "green") if each.is_new else "already sealed, and unchanged"
        print(f"{clean(each.path)}: {word}: {what}")


def _object(done: "list[Sealed]") -> dict[str, object]:
    return {
        "schema_version": 1,
        "object": "seal",
        "sealed": [
            {
                "path": each.path,
                "step": each.seal.step,
                "files": len(each.seal.files),
                "size_bytes": each.seal.size_bytes,
                "digest": each.digest,
                "sealed_at": each.seal.sealed_at,
                "is_new": each.is_new,
            }
            for each in done
        ],
    }
