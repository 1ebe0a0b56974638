"""What is installed: modules, data files, entry points, and the command as a process sees it."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import types
import zipfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from kvloft.cli import main as cli
from kvloft.errors import KVLoftError

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "vllm", "numba", "transformers", "tokenizers")


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)


def project() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


# --- modules -------------------------------------------------------------------------------------


def test_core_modules_import_where_no_engine_is_installed() -> None:
    """Whatever does not drive the engine must import without torch, vLLM or their libraries."""
    package = ROOT / "src" / "kvloft"
    paths = [path.relative_to(package.parent).with_suffix("") for path in package.rglob("*.py")]
    modules = sorted(
        ".".join(path.parts).removesuffix(".__init__")
        for path in paths
        if "engines" not in path.parts and path.name not in ("__main__", "stress")
    )
    assert "kvloft.geometry" in modules
    blocked = f"""
import importlib, sys
for name in {HEAVY!r}:
    sys.modules[name] = None  # makes "import name" raise ModuleNotFoundError
for name in {modules!r}:
    importlib.import_module(name)
"""
    result = run_python("-W", "error", "-c", blocked)
    assert result.returncode == 0, result.stderr


def test_entry_points_name_what_exists() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="kvloft")
    assert command.load() is cli.main
    (plugin,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvloft")
    assert plugin.attr == "register"
    # Not load(): that would import the engine into this process.
    spec = importlib.util.find_spec(plugin.module)
    assert spec is not None
    assert spec.origin is not None
    assert "def register(" in Path(spec.origin).read_text()


# --- files ---------------------------------------------------------------------------------------


def test_package_data_can_be_read() -> None:
    assert files("kvloft").joinpath("py.typed").is_file()
    geometries = [
        entry
        for entry in files("kvloft").joinpath("geometries").iterdir()
        if entry.name.endswith(".json")
    ]
    assert "gemma-4-31b.json" in {entry.name for entry in geometries}
    for entry in geometries:
        assert json.loads(entry.read_text())["schema"] == "kvloft-geometry/1", entry.name
    text = files("kvloft").joinpath("engines", "vllm", "text")
    assert any(entry.read_text() for entry in text.iterdir() if entry.is_file())


def test_wheel_holds_every_file_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = pytest.importorskip("hatchling.build")
    monkeypatch.chdir(ROOT)
    name = build.build_wheel(str(tmp_path))
    with zipfile.ZipFile(tmp_path / name) as wheel:
        shipped = set(wheel.namelist())
    expected = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "kvloft").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= shipped, sorted(expected - shipped)
    for name in ("LICENSE", "NOTICE"):
        assert any(entry.endswith(f".dist-info/licenses/{name}") for entry in shipped), name


def test_run_time_dependencies_float_and_tools_are_pinned() -> None:
    metadata = project()
    extras = metadata["optional-dependencies"]
    assert isinstance(extras, dict)
    assert isinstance(metadata["dependencies"], list)
    for requirement in [*metadata["dependencies"], *extras["cli"]]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+", requirement), requirement
    for requirement in extras["dev"]:
        assert re.fullmatch(r"[\w-]+==[\d.]+", requirement), requirement


# --- the command ---------------------------------------------------------------------------------


def test_plan_loads_no_engine() -> None:
    script = f"""
import sys
from kvloft.cli.main import main
code = main(["plan", "gemma-4-31b"])
loaded = sorted(set({HEAVY!r}) & set(sys.modules))
print("loaded:", loaded, file=sys.stderr)
sys.exit(code)
"""
    result = run_python("-c", script)
    assert result.returncode == 0, result.stderr
    assert "loaded: []" in result.stderr
    assert result.stdout.strip()


def test_help_of_every_command_loads_no_engine() -> None:
    script = f"""
import sys
from kvloft.cli.main import main
try:
    main(["--help"])
finally:
    assert not set({HEAVY!r}) & set(sys.modules)
"""
    result = run_python("-c", script)
    assert result.returncode == 0, result.stderr
    for name in cli.COMMANDS:
        assert name in result.stdout


def test_version_is_the_project_s() -> None:
    result = run_python("-m", "kvloft.cli", "--version")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"kvloft {project()['version']}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["plan"], ["plan", "no-such-model"]])
def test_what_the_user_can_mend_exits_2_with_a_message(arguments: list[str]) -> None:
    result = run_python("-m", "kvloft.cli", *arguments)
    assert result.returncode == 2
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_reader_that_left_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        result = subprocess.run(
            [sys.executable, "-m", "kvloft.cli", "plan", "gemma-4-31b"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 141
    assert result.stderr == ""


def install_command(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]
) -> None:
    """Make ``kvloft fake`` call ``run``."""
    module = types.ModuleType("kvloft.cli.fake")

    def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        subparsers.add_parser("fake").set_defaults(run=run)

    vars(module)["add_parser"] = add_parser
    monkeypatch.setitem(sys.modules, "kvloft.cli.fake", module)
    monkeypatch.setattr(cli, "COMMANDS", ("fake",))


def test_exit_code_is_the_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, lambda args: 7)
    assert cli.main(["fake"]) == 7


def failing(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KVLoftError("block_size is 7"), 2, "kvloft: error: block_size is 7\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.json"),
            2,
            "kvloft: error: a.json: No such file or directory\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_become_messages(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    install_command(monkeypatch, failing(error))
    assert cli.main(["fake"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("error", [ValueError("defect"), OSError(5, "Input/output error")])
def test_defects_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    install_command(monkeypatch, failing(error))
    with pytest.raises(type(error)):
        cli.main(["fake"])
