"""Who may import whom, and other rules that are read off the syntax trees of the package.

Each rule is a function from a module to a list of complaints, so that it can be shown to find what it forbids.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = "hf_specdec"
ROOT = Path(__file__).parents[2] / PACKAGE

# A module imports only from lower ranks, or from its own package.
RANKS = {
    "errors": 0,
    "records": 0.5,
    "health": 1,
    "hints": 1,
    "bandwidth": 1,
    "learned": 3,
    "metrics": 1,
    "placement": 1,
    "quiet": 1,
    "config": 1.5,  # its callback takes a record of metrics
    "controller": 2,
    "outputs": 2,
    "pairing": 2,
    "memory": 2,
    "quality": 2.5,
    "loading": 3,
    "matching": 3.5,
    "engine": 3,
    "drafters": 4,
    "refusals": 4,
    "routing": 4.5,
    "call": 4.75,
    "generation": 5,
    "cards": 5,
    "demo": 5.5,
    "benchmark": 6,
    "cli": 7,
    "__main__": 8,
}
RANK_OF_THE_PACKAGE_ITSELF = 5.25  # its __init__ imports generation, so only those above may import names from it

FREE_OF_TORCH = {"bandwidth", "errors", "records", "config", "health", "hints", "metrics", "controller"}
FREE_OF_TORCH |= {"pairing.fields", "pairing.records", "pairing.schema"}
MAY_CALL_THE_HUB = {"pairing.hub", "cards"}
MAY_USE_PRIVATE_HOST_NAMES = {"generation", "engine.host", "engine.cache"}
SYNCING_CALLS = {"item", "tolist", "cpu"}
NAMES_THAT_SAY_NOTHING = {"utils", "helpers", "common", "misc"}
MOST_LINES_PER_FILE = 400


@dataclass(frozen=True)
class Module:
    """A module of the package: `name` without the package in front ("" for the package itself), and its source."""

    name: str
    source: str = field(repr=False)
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    @property
    def parent(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    def imports(self) -> Iterator[tuple[str, str | None]]:
        """Every import as (absolute module, imported name), those inside functions and TYPE_CHECKING included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((self._absolute(node), alias.name) for alias in node.names)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"import_module", "importlib.import_module"}:
                values = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
                yield from ((value, None) for value in values if isinstance(value, str))

    def rooms_imported(self) -> Iterator[str]:
        """The rooms of our package that this module imports; "" for names of the package itself."""
        for module, name in self.imports():
            top, _, rest = module.partition(".")
            if top == PACKAGE:
                yield rest.partition(".")[0] if rest else (name if name in RANKS else "") or ""

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        base = [PACKAGE, *filter(None, self.parent.split("."))]
        base = base[: len(base) - node.level + 1]
        return ".".join([*base, node.module] if node.module else base)


def read_modules() -> list[Module]:
    modules = []
    for path in sorted(ROOT.rglob("*.py")):
        is_package = path.name == "__init__.py"
        parts = path.relative_to(ROOT).with_suffix("").parts[: -1 if is_package else None]
        modules.append(Module(".".join(parts), path.read_text(encoding="utf-8"), is_package))
    return modules


# --- rules ----------------------------------------------------------------------------------------------------------


def wrong_ranks(module: Module) -> list[str]:
    if not module.name:
        return []
    if module.room not in RANKS:
        return [f"{module.name} has no rank; give it one in {Path(__file__).name}"]
    rank = RANKS[module.room]
    return [
        f"{module.name} (rank {rank:g}) imports {room or PACKAGE}"
        for room in module.rooms_imported()
        if room != module.room and RANKS.get(room, RANK_OF_THE_PACKAGE_ITSELF) >= rank
    ]


def stray_bitsandbytes(module: Module) -> list[str]:
    found = [name for name, _ in module.imports() if name.split(".")[0] == "bitsandbytes"]
    return [f"{module.name} imports {name}" for name in found if module.room != "loading"]


def stray_torch(module: Module) -> list[str]:
    heavy = {"torch", "transformers"}
    found = [name for name, _ in module.imports() if name.split(".")[0] in heavy]
    return [f"{module.name} imports {name}" for name in found if {module.room, module.name} & FREE_OF_TORCH]


def stray_hub_calls(module: Module) -> list[str]:
    found = [name for name, _ in module.imports() if name.split(".")[0] == "huggingface_hub"]
    return [f"{module.name} imports {name}" for name in found if module.name not in MAY_CALL_THE_HUB]


def stray_print(module: Module) -> list[str]:
    if module.room == "cli":
        return []
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    return [
        f"{module.name}:{call.lineno} prints"
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "print"
    ]


def stray_private_host_names(module: Module) -> list[str]:
    if module.name in MAY_USE_PRIVATE_HOST_NAMES:
        return []
    imported = [
        f"{host}.{name}" if name else host for host, name in module.imports() if host.split(".")[0] == "transformers"
    ]
    used = [".".join(chain) for chain in host_attributes(module)]
    return [f"{module.name} uses {name}" for name in imported + used if any(map(is_private, name.split(".")))]


def host_attributes(module: Module) -> Iterator[list[str]]:
    """Chains such as ["cache_utils", "_x"] of attributes read from a name that was imported from transformers."""
    bound = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name.split(".")[0] == "transformers"]
            bound |= {alias.asname or "transformers" for alias in aliases}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            bound |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node).split(".")
            if chain[0] in bound:
                yield chain


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def uncommented_syncs(module: Module) -> list[str]:
    if module.room not in {"engine", "drafters"}:
        return []
    lines = module.source.splitlines()
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    return [
        f"{module.name}:{call.lineno} calls .{call.func.attr}() without a `# sync:` comment"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in SYNCING_CALLS
        and not has_sync_comment(lines, call.lineno, call.end_lineno or call.lineno)
    ]


def has_sync_comment(lines: list[str], first: int, last: int) -> bool:
    """Whether lines `first`..`last` (from 1) carry the comment, or the block of comment lines above them does."""
    start = first - 1
    while start > 0 and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return any("# sync:" in line for line in lines[start:last])


def names_that_say_nothing(module: Module) -> list[str]:
    return [f"{module.name} says nothing" for part in module.name.split(".") if part in NAMES_THAT_SAY_NOTHING]


def too_many_lines(module: Module) -> list[str]:
    num_lines = len(module.source.splitlines())
    return [f"{module.name} has {num_lines} lines"] if num_lines > MOST_LINES_PER_FILE else []


# --- the package ----------------------------------------------------------------------------------------------------

Rule = Callable[[Module], list[str]]
RULES: list[Rule] = [
    wrong_ranks,
    stray_bitsandbytes,
    stray_torch,
    stray_hub_calls,
    stray_print,
    stray_private_host_names,
    uncommented_syncs,
    names_that_say_nothing,
    too_many_lines,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_follows_the_rule(rule: Rule) -> None:
    modules = read_modules()
    assert {"", "errors", "engine", "engine.acceptance"} <= {module.name for module in modules}
    complaints = [complaint for module in modules for complaint in rule(module)]
    assert not complaints, "\n".join(complaints)


# --- the rules themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (wrong_ranks, "metrics", "from hf_specdec.config import SpeculativeConfig"),
        (wrong_ranks, "controller", "import hf_specdec.outputs"),
        (wrong_ranks, "engine.loop", "from hf_specdec.drafters.model import ModelDrafter"),
        (wrong_ranks, "engine.loop", "from ..drafters import model"),
        (wrong_ranks, "engine.loop", "from hf_specdec import generation"),
        (wrong_ranks, "engine.loop", "from hf_specdec import __version__"),
        (wrong_ranks, "loading", "from .engine import loop"),
        (wrong_ranks, "generation", "def f():\n    from hf_specdec.cli import app"),
        (wrong_ranks, "demo.pair", "from hf_specdec import benchmark"),
        (wrong_ranks, "novelty", ""),
        (stray_bitsandbytes, "engine.loop", "def f():\n    import bitsandbytes.nn as bnb"),
        (stray_bitsandbytes, "memory", "from bitsandbytes import nn"),
        (stray_bitsandbytes, "memory", "import importlib\nimportlib.import_module('bitsandbytes')"),
        (stray_torch, "metrics", "from torch import Tensor"),
        (stray_torch, "controller", "import torch.nn"),
        (stray_torch, "pairing.schema", "import torch"),
        (stray_hub_calls, "pairing.folder", "def f():\n    from huggingface_hub import hf_hub_download"),
        (stray_print, "demo.pair", "def f():\n    print('hello')"),
        (stray_private_host_names, "outputs", "from transformers.generation.utils import _x"),
        (stray_private_host_names, "engine.loop", "import transformers\ntransformers.utils._x()"),
        (stray_private_host_names, "engine.loop", "from transformers import GenerationMixin\nGenerationMixin._sample"),
        (uncommented_syncs, "engine.loop", "x.item()"),
        (uncommented_syncs, "drafters.model", "# sync: this is not directly above\nx = 1\ny = x.tolist()"),
        (uncommented_syncs, "engine.loop", "x.to(y).cpu()  # why"),
        (names_that_say_nothing, "engine.utils", ""),
        (too_many_lines, "engine.loop", "\n" * 401),
    ],
)
def test_rule_finds_what_it_forbids(rule: Rule, name: str, source: str) -> None:
    assert rule(Module(name, source))


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (wrong_ranks, "config", "from hf_specdec.metrics import RoundRecord"),
        (wrong_ranks, "engine.loop", "from hf_specdec.engine import state\nfrom . import cache\nfrom .. import errors"),
        (wrong_ranks, "cli.app", "from hf_specdec import __version__, enable, demo, benchmark"),
        (wrong_ranks, "benchmark.runner", "from hf_specdec.demo import load"),
        (stray_bitsandbytes, "loading", "import bitsandbytes"),
        (stray_torch, "outputs", "import torch"),
        (stray_torch, "pairing.folder", "import torch"),
        (stray_hub_calls, "pairing.hub", "import huggingface_hub"),
        (stray_print, "cli.app", "print('hello')"),
        (stray_private_host_names, "generation", "from transformers.generation.utils import _x"),
        (stray_private_host_names, "loading", "import transformers\ntransformers.__version__"),
        (uncommented_syncs, "engine.loop", "x.item()  # sync: the round's one\n# sync: why\n# and more\nx.tolist()"),
        (uncommented_syncs, "benchmark.runner", "x.item()"),
        (too_many_lines, "engine.loop", "\n" * 400),
    ],
)
def test_rule_allows_what_it_should(rule: Rule, name: str, source: str) -> None:
    assert rule(Module(name, source)) == []
