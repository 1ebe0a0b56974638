"""Parse the command line, run one command, turn what goes wrong into a message and an exit code.

A command is a module of this package with the command's name and two functions::

    def add_parser(subparsers) -> None    # adds its parser and sets the default run=run
    def run(args: argparse.Namespace) -> int

Both are reached without loading torch or an engine: a command imports those inside ``run``. Only
the module of the command that was asked for is imported; help for all of them imports all.

Exit codes: what the command returns; 2 for anything the user can mend (bad options, bad files); 130
after an interrupt; 141 when whoever read the output has gone, as in ``kvloft plan … | head``.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from kvloft.errors import KVLoftError

COMMANDS = ("plan", "store", "replay", "demo", "bench", "stress")

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
READER_GONE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments) and return its exit code.

    Raises SystemExit, as argparse does, for ``--help`` and for arguments that don't parse.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _run(argv)
        # Here rather than at interpreter exit, where a broken pipe could no longer be handled.
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except KVLoftError as error:
        return _complain(str(error))
    except OSError as error:
        # With a file name it is a path that someone typed; without, a defect worth a traceback.
        if error.filename is None:
            raise
        return _complain(f"{error.filename}: {error.strerror}")
    return code


def _run(argv: list[str]) -> int:
    parser = _parser(argv)
    args = parser.parse_args(argv)
    if args.version:
        from importlib.metadata import version

        print(f"kvloft {version('kvloft')}")
        return 0
    if args.command is None:
        parser.error(f"a command is needed: {', '.join(COMMANDS)}")
    code: int = args.run(args)
    return code


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvloft", description="Keep an inference engine's KV cache in larger, cheaper memory."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    wanted = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    for name in wanted:
        importlib.import_module(f"kvloft.cli.{name}").add_parser(subparsers)
    return parser


def _complain(message: str) -> int:
    print(f"kvloft: error: {message}", file=sys.stderr)
    return USER_ERROR


def _discard_stdout() -> None:
    """Let the interpreter's own flush at exit succeed, so that it prints no second complaint."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
