"""What the documents show is true: their code compiles and names what there is, their commands parse, the quick ones run, and
the files that they name are there. A failure names the document and the line.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import gzip
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

import gradlane
from gradlane.cli import main
from gradlane.compare.records import Comparison
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.search_log import SearchLog
from gradlane.core.records.tuned import Tuned
from gradlane.core.timeline import Timeline
from tests.commands import ROOT, command_line
from tests.unit.test_trace import kineto

FOLDERS = ("docs", "bench/notes", "experiments/notes")
DOCUMENTS = [
    "ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "native/wire/wire.md",
    *sorted(f"{folder}/{path.name}" for folder in FOLDERS for path in (ROOT / folder).glob("*.md")),
]  # fmt: skip
SECONDS = 60
"""What a command that is run may take."""

# a reader's own files, which commands in the documents read and write
THEIRS = {
    "train.py", "file.py", "profile.json", "network.json", "plan.json", "tuned.json", "lab.json", "timeline.json", "graph.txt",
    "comparison.json", "sweep.json", "config.json", "my_policy.py", "test_my_policy.py",
}  # fmt: skip
# what a reader of docs/policies.md writes: the first listing there
READERS_MODULE = "my_policy"
# of extras that `make setup` leaves out
LEFT_OUT = {"accelerate", "transformers", "lightning", "ray", "jax", "keras", "tensorflow"}
# of files, in their first line: no modules
FORMATS = {
    f"gradlane.{noun}"
    for noun in ("profile", "network", "cluster", "plan", "timeline", "tuned", "log", "searchlog", "comparison", "sweep")
}
# the commands that are quick, and so are run where what they read is at hand
QUICK = {"plan", "simulate", "whatif", "zoo", "policies", "convert"}
# what a reader has before the lines of a block begin
AMBIENT = {
    "model", "optimizer", "batches", "loss_of", "images", "labels", "path", "small", "train_one_step", "EqualParts",
    "Groups", "dist", "torch", "gradlane", "session",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Lines of a document that are shown as code: fenced, with the fence's language, or indented."""

    document: str
    line: int
    language: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """A command line in a document, in a block or between backticks. text: with continuation lines, without a comment."""

    document: str
    line: int
    text: str
    shown: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return [word for word in shlex.split(self.text) if word != "..."]

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text}"


def blocks(document: str) -> Iterator[Block]:
    lines = (ROOT / document).read_text().splitlines()
    at = 0
    while at < len(lines):
        begun, line = at, lines[at]
        if line.startswith("```"):
            at += 1
            while not lines[at].startswith("```"):
                at += 1
            yield Block(document, begun + 2, line.removeprefix("```") or "plain", tuple(lines[begun + 1 : at]))
        elif line.startswith("    ") and not lines[at - 1].strip():
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            yield Block(document, begun + 1, "indented", tuple(one[4:] for one in lines[begun:at]))
            continue
        at += 1


STARTS = re.compile(r"(?:\$ )?((?:gradlane|python -m|torchrun|make) .*)")


def commands(document: str) -> Iterator[Command]:
    for block in blocks(document):
        at = 0
        while at < len(block.lines):
            begun, found = at, STARTS.fullmatch(block.lines[at])
            at += 1
            if found is None or block.language == "python":
                continue
            text = found[1]
            while text.endswith("\\"):
                text = text[:-1] + block.lines[at].strip()
                at += 1
            shown = block.lines[at:] if block.lines[begun].startswith("$ ") else ()
            yield Command(document, block.line + begun, re.sub(r"\s+#.*", "", text).strip(), shown)
    in_block = {block.line + n for block in blocks(document) for n in range(len(block.lines))}
    text = (ROOT / document).read_text()
    for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        line = text.count("\n", 0, span.start()) + 1
        if line not in in_block and STARTS.fullmatch(" ".join(span[1].split())):
            yield Command(document, line, " ".join(span[1].split()))


ALL_COMMANDS = [command for document in DOCUMENTS for command in commands(document)]
each_document = pytest.mark.parametrize("document", DOCUMENTS)


def test_pages_and_notes_are_among_the_documents() -> None:
    assert {"docs/README.md", "docs/auto.md", "bench/notes/auto.md", "experiments/notes/fidelity.md"} < set(DOCUMENTS)


def test_what_is_checked_is_found_in_the_documents() -> None:
    assert len(ALL_COMMANDS) > 60
    assert len(list(python_of("docs/lab.md"))) == 1
    assert [line for line, _ in python_of("docs/training.md")] == [108, 131, 147, 171]
    assert len(list(blocks("docs/planning.md"))) == 13
    assert len(places("bench/notes/faults.md")) > 20


# -- Python -------------------------------------------------------------------------------------------------


def python_of(document: str) -> Iterator[tuple[int, str]]:
    """(line, code) of each block that says that it is Python, or is indented and speaks of gradlane or torch in Python."""
    for block in blocks(document):
        if block.language == "python":
            yield block.line, "\n".join(block.lines)
        elif block.language == "indented":
            # commands may stand among the lines
            code = "\n".join("" if STARTS.fullmatch(line) else line for line in block.lines)
            if re.search(r"^(gradlane\.|torch\.|session\.|with torch\.|import )", code, re.MULTILINE):
                yield block.line, code


def resolve(dotted: str) -> Any:
    """The object of that name, whatever parts of it are modules. Raises AttributeError or ImportError."""
    found: Any = importlib.import_module(dotted.partition(".")[0])
    name = found.__name__
    for part in dotted.split(".")[1:]:
        name = f"{name}.{part}"
        if not hasattr(found, part) and inspect.ismodule(found):
            importlib.import_module(name)
        found = getattr(found, part)
    return found


def is_left_out(place: str) -> bool:
    """Whether it is of a trainer or framework that is not installed."""
    package = re.sub(r"^gradlane\.(integrations|plugin)\.", "", place).partition(".")[0]
    return package in LEFT_OUT and importlib.util.find_spec(package) is None


def dotted_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return base and f"{base}.{node.attr}"
    return None


def faults_of(code: str) -> Iterator[tuple[int, str]]:
    """(line in the code, what is wrong)."""
    tree = ast.parse(code)
    known = {"gradlane": "gradlane", "torch": "torch", "dist": "torch.distributed"}  # name in the code -> place
    bound = {*AMBIENT, *dir(builtins)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                place = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
                name = alias.asname or alias.name.partition(".")[0]
                known[name] = place if alias.asname or isinstance(node, ast.ImportFrom) else name
                bound.add(name)
                if place.partition(".")[0] == READERS_MODULE or is_left_out(place):
                    del known[name]
                    continue
                try:
                    resolve(place)
                except (ImportError, AttributeError) as error:
                    yield node.lineno, str(error)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            bound.add(node.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in bound:
            yield node.lineno, f"{node.id} is defined nowhere"
        if isinstance(node, ast.Attribute) and (place := dotted_name(node)) and (root := place.partition(".")[0]) in known:
            try:
                resolve(place.replace(root, known[root], 1))
            except (ImportError, AttributeError) as error:
                yield node.lineno, str(error)
        if isinstance(node, ast.Call) and (name := dotted_name(node.func)) and (root := name.partition(".")[0]) in known:
            try:
                called = resolve(name.replace(root, known[root], 1))
                signature = inspect.signature(called)
            except (ImportError, AttributeError, ValueError):
                continue  # told above; or written in C
            given = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            try:
                signature.bind(*node.args, **given)
            except TypeError as error:
                yield node.lineno, f"{name}(): {error}"


@each_document
def test_python_compiles_and_names_what_there_is(document: str) -> None:
    wrong = []
    for line, code in python_of(document):
        try:
            wrong += [f"{document}:{line + at - 1}: {fault}" for at, fault in faults_of(code)]
        except SyntaxError as error:
            wrong.append(f"{document}:{line + (error.lineno or 1) - 1}: {error.msg}")
    assert not wrong, "\n".join(wrong)


@each_document
def test_names_of_gradlane_between_backticks_are_there(document: str) -> None:
    wrong = []
    classes = "|".join(name for name in gradlane.__all__ if name[0].isupper())
    for line, text in enumerate((ROOT / document).read_text().splitlines(), 1):
        for name in re.findall(rf"`((?:gradlane|{classes})(?:\.\w+)+)", text):
            dotted = name if name.startswith("gradlane.") else f"gradlane.{name}"
            try:
                if name not in FORMATS and not is_left_out(name):
                    resolve(dotted)
            except (ImportError, AttributeError) as error:
                wrong.append(f"{document}:{line}: {name}: {error}")
    assert not wrong, "\n".join(wrong)


def names_in(kind: Any) -> set[str]:
    """The names of the fields of a type of `msgspec.inspect` in a file, and of all that they have."""
    if isinstance(kind, msgspec.inspect.StructType):
        own = set() if kind.array_like else {field.encode_name for field in kind.fields}
        return own.union(*(names_in(field.type) for field in kind.fields))
    parts = [getattr(kind, name, ()) for name in ("item_type", "types", "item_types", "value_type")]
    return set().union(*(names_in(each) for part in parts for each in (part if isinstance(part, tuple) else (part,))))


@pytest.mark.parametrize("kind", [Profile, Network, Cluster, Plan, Timeline, Tuned, SearchLog, Comparison])
def test_the_page_of_formats_has_every_field_of_a_file(kind: type) -> None:
    page = (ROOT / "docs/formats.md").read_text()
    (row,) = re.findall(rf"^\| {kind.__name__.lower()}\b.*", page, re.MULTILINE)
    of_body = {field.encode_name for field in msgspec.structs.fields(kind)}
    assert of_body - set(re.findall(r"`(\w+)`", row)) == set()
    assert names_in(msgspec.inspect.type_info(kind)) - set(re.findall(r"`(\w+)`", page)) == set()


# -- commands -----------------------------------------------------------------------------------------------


@dataclass
class Option:
    takes_value: bool
    choices: tuple[str, ...] = ()


def options_of(command: click.Command) -> dict[str, Option]:
    found = {name: Option(takes_value=False) for name in ("--help", "-h")}
    for param in command.params:
        if isinstance(param, click.Option):
            choices = tuple(param.type.choices) if isinstance(param.type, click.Choice) else ()
            for name in (*param.opts, *param.secondary_opts):
                found[name] = Option(not param.is_flag, choices)
    return found


def options_of_launch() -> dict[str, Option]:
    from gradlane.cli.launch import _add_options
    from gradlane.live.startup import torchrun

    parser = argparse.ArgumentParser(parents=[torchrun.arguments()], add_help=False, conflict_handler="resolve")
    _add_options(parser)
    return {
        name: Option(action.nargs != 0, tuple(map(str, action.choices or ())))
        for name, action in parser._option_string_actions.items()
    }


def fault_of_options(words: list[str], options: dict[str, Option], until_first: bool) -> str | None:
    """What is wrong with the options among the words. until_first: what follows the first word that is none is not ours."""
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            return None
        if not word.startswith("--"):
            if until_first:
                return None
            continue
        name, given, value = word.partition("=")
        if name not in options:
            return f"there is no {name}, only {', '.join(sorted(options))}"
        if options[name].takes_value:
            # `--packet-bytes` between backticks may stand without one
            value = value if given else words.pop(0) if words else ""
            if value and options[name].choices and not set(value.split(",")) <= {*options[name].choices}:
                return f"{name} {value}: expected one of {', '.join(options[name].choices)}"
    return None


def fault_of(words: list[str]) -> str | None:
    if words[0] == "gradlane":
        return fault_of_gradlane(words[1:])
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if words[1] in targets else f"the Makefile has no {words[1]}"
    if words[:2] == ["python", "-m"]:
        module, rest = words[2], words[3:]
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
        if spec is None or spec.origin is None:
            return f"there is no module {module} that can be run"
        source = Path(spec.origin).read_text()
        for word in rest:
            if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source:
                return f"{module} knows no {word}"
    return None


def fault_of_gradlane(words: list[str]) -> str | None:
    command: click.Command = main
    words = list(words)
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        if name.startswith("-"):
            return None if name in options_of(command) else f"there is no {name}"
        found = command.get_command(click.Context(command), name)
        if found is None:
            return f"there is no command {name}"
        command = found
        if name == "launch":
            return fault_of_options(words, options_of_launch(), until_first=True)
    fault = fault_of_options(words, options_of(command), until_first=not command.allow_interspersed_args)
    if fault is None and "--" in words:
        inner = words[words.index("--") + 1 :]
        return fault_of(inner) if inner else None
    return fault


@each_document
def test_commands_and_their_options_exist(document: str) -> None:
    wrong = []
    for command in ALL_COMMANDS:
        if command.document == document:
            fault = fault_of(command.words)
            if fault is not None:
                wrong.append(f"{command}: {fault}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("gradlane pln vgg16", "there is no command pln"),
        ("gradlane plan vgg16 --rates 1gbit", "there is no --rates"),
        ("gradlane whatif band vgg16", "there is no command band"),
        ("gradlane lab --host 4 -- train.py --host 4", "there is no --host,"),
        ("gradlane lab --hosts 4 -- python -m bench.nothing", "no module bench.nothing"),
        ("gradlane launch --ncpu 2 train.py --ncpu 2", "there is no --ncpu,"),
        ("gradlane launch --backend nccl train.py", "expected one of all-reduce, server"),
        ("python -m bench.auto --change-all 2", "bench.auto knows no --change-all"),
        ("make coffee", "the Makefile has no coffee"),
    ],
)
def test_a_command_that_does_not_exist_would_be_found(text: str, fault: str) -> None:
    assert fault in (fault_of(shlex.split(text)) or "")


def quick_ones() -> Iterator[Command]:
    """The quick commands that are shown with all that they need."""
    seen = set()
    for command in ALL_COMMANDS:
        words = command.words
        if words[0] != "gradlane" or words[1] not in QUICK or command.text in seen:
            continue
        by_itself = len(words) > 2 or words[1] in ("zoo", "policies")
        whole = "..." not in command.text and not any(word.isupper() and len(word) > 2 for word in words)
        if by_itself and whole and words[1:] != ["whatif", "rates"]:
            seen.add(command.text)
            yield command


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a reader would have by then."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "profile").mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("profile.json", "network.json"):
        shutil.copy(ROOT / "tests" / "golden" / name, folder)
        shutil.copy(ROOT / "tests" / "golden" / name, folder / "profile")
    (folder / f"{READERS_MODULE}.py").write_text(
        next(code for _, code in python_of("docs/policies.md") if "class Groups" in code)
    )
    (folder / "trace.json.gz").write_bytes(gzip.compress(json.dumps(kineto()).encode()))
    return folder


@pytest.mark.parametrize("command", list(quick_ones()), ids=str)
def test_quick_commands_run_and_print_what_is_shown(command: Command, readers_folder: Path) -> None:
    done = subprocess.run(
        command_line(*command.words[1:]), cwd=readers_folder, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def plain(line: str) -> str:
        return " ".join(re.sub(r"[━─┃│┏┓┡┩└┘┳╇┴┗┛╃╄╈╋┼]+", " ", line).split())

    printed = plain(" ".join(done.stdout.splitlines()))
    for at, line in enumerate(command.shown):
        if line.strip() != "...":
            assert plain(line) in printed, f"{command.document}:{command.line + 1 + at}: not printed: {line}\n{done.stdout}"


# -- files --------------------------------------------------------------------------------------------------

KINDS = r"py|md|cc|h|json|out|toml|yaml|txt|cmake"
WHERE = ("", "docs", "src/gradlane", "native")


def places(document: str) -> list[tuple[int, str]]:
    """(line, place) of each file or folder of the repository that is named between backticks or linked to."""
    tops = {path.name for folder in (ROOT, ROOT / "src" / "gradlane", ROOT / "native") for path in folder.iterdir()}
    found = []
    for line, text in enumerate((ROOT / document).read_text().splitlines(), 1):
        for span in re.findall(r"`([^`\s]+)`", text):
            place = span.partition("::")[0].partition(":")[0]
            names_a_file = re.fullmatch(rf"[\w./-]*\w\.(?:{KINDS})", place) is not None
            in_a_folder = re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*/?", place) and "/" in place and place.partition("/")[0] in tops
            left_out = place in THEIRS or place.startswith(("out/", "build/")) or re.search(r"/[A-Z]+\.py$", place)
            if (names_a_file or in_a_folder) and not left_out:
                found.append((line, place))
            elif re.fullmatch(r"test_\w+", span):
                path = next((ROOT / "tests").rglob(f"{span}.py"), None)
                found.append((line, str(path or f"{span}.py")))
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in link:
                found.append((line, link))
    return found


def anchors_of(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_document
def test_files_and_anchors_that_are_named_are_there(document: str) -> None:
    wrong = []
    for line, place in places(document):
        name, _, anchor = place.partition("#")
        here = (ROOT / document).parent
        there = [path for base in (here, *(ROOT / where for where in WHERE)) if (path := base / name).exists()] if name else []
        path = ROOT / document if not name else there[0] if there else None
        if path is None:
            wrong.append(f"{document}:{line}: there is no {place}")
        elif anchor and anchor not in anchors_of(path):
            wrong.append(f"{document}:{line}: {name} has no heading #{anchor}")
    assert not wrong, "\n".join(wrong)


@each_document
def test_each_table_has_its_heading(document: str) -> None:
    """A row after a blank line is shown as text: it belongs to no table."""
    lines = ["", *(ROOT / document).read_text().splitlines(), ""]
    rows = [line.startswith("|") for line in lines]
    begins = [at for at in range(1, len(lines) - 1) if rows[at] and not rows[at - 1]]
    wrong = [f"{document}:{at}: {lines[at][:60]}" for at in begins if not re.fullmatch(r"\|[-:| ]+\|", lines[at + 1])]
    assert not wrong, "\n".join(wrong)


def test_each_fault_that_is_said_to_be_tested_is_the_name_of_a_test() -> None:
    """bench/notes/faults.md names tests as `file`: words of the test's name."""
    wrong, checked = [], 0
    for line, text in enumerate((ROOT / "bench" / "notes" / "faults.md").read_text().splitlines(), 1):
        for file, words in re.findall(r"`(test_\w+)`: ([\w\- ']+)", text):
            (path,) = (ROOT / "tests").rglob(f"{file}.py")
            names = re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
            said = re.sub(r"[- ]", "_", words.strip().replace("'", ""))
            checked += 1
            if not any(said in name for name in names):
                wrong.append(f"bench/notes/faults.md:{line}: {file}.py has no test with {said!r} in its name")
    assert checked > 20
    assert not wrong, "\n".join(wrong)
