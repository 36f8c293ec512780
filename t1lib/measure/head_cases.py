"""What is measured of an output layer: shapes, cases and bars, parsed from a notebook's flat parameters."""

from dataclasses import dataclass, field
from typing import Any

from t1lib.errors import T1Error, choose, require
from t1lib.heads import HEADS, parse_bytes
from t1lib.measure.peers import PEERS

OPTIONS = ("bias", "class-weight", "label-smoothing", "softcap", "z-loss", "token-weight", "stats")
KINDS = ("loss", "both", "none", "half", "frozen", "options")
MODEL = "M"  # the shape of the small model's output layer
FILTER_EPS = 2.0**-12  # as in Cut Cross-Entropy for bfloat16


@dataclass(frozen=True)
class Shape:
    """N tokens, V vocabulary, D hidden size."""

    name: str
    tokens: int
    vocabulary: int
    hidden: int


@dataclass(frozen=True)
class Case:
    """One way to call one method. `settings` are keyword arguments of the head: workspace, filter_eps.

    gradients  compute the loss and its gradients; False: the loss alone, without autograd
    upstream   use reduction "none", with a random upstream gradient for every token's loss
    ignored    share of tokens that are ignored
    frozen     the weight requires no gradient
    option     the one of `OPTIONS` that is switched on
    """

    variant: str
    method: str
    gradients: bool = True
    upstream: bool = False
    ignored: float = 0.0
    frozen: bool = False
    option: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Unique name: one variant may be measured both with gradients and for the loss alone."""
        return self.variant if self.gradients else f"{self.variant}/loss"

    @property
    def prefix(self) -> str:
        """Prefix of the metrics' names: "loss_" for the loss alone."""
        return "" if self.gradients else "loss_"

    @property
    def filtered(self) -> bool:
        """Whether the gradients are inexact on purpose."""
        peer = PEERS.get(self.method)
        return "filter_eps" in self.settings or (peer is not None and not peer.exact)


@dataclass(frozen=True)
class Bar:
    """A bound on the time of head `fused` on `shapes`, within `workspace`: at most `limit` times that of `over`."""

    shapes: tuple[str, ...]
    kind: str
    workspace: str
    limit: float

    @property
    def over(self) -> str:
        """logits: that one product; three: all three products; plain: same head and workspace without the change."""
        return {"loss": "logits", "both": "three", "none": "three"}.get(self.kind, "plain")

    def cases(self) -> list[Case]:
        """The cases that the bar bounds: one, or one for each option."""
        settings = {"workspace": self.workspace}
        name = f"fused-{{}}{self.workspace}"
        if self.kind == "options":
            return [Case(name.format(o + "-"), "fused", option=o, settings=settings) for o in OPTIONS]
        if self.kind in ("loss", "both"):
            return [Case(name.format(""), "fused", gradients=self.kind == "both", settings=settings)]
        change = {"none": {"upstream": True}, "half": {"ignored": 0.5}, "frozen": {"frozen": True}}[self.kind]
        return [Case(name.format(self.kind + "-"), "fused", settings=settings, **change)]


def fused(workspace: str) -> Case:
    """The head `fused` within a workspace: loss and gradients, reduction "mean"."""
    return Case(f"fused-{workspace}", "fused", settings={"workspace": workspace})


def filtered(workspace: str) -> Case:
    """The same, with gradient filtering as in Cut Cross-Entropy."""
    settings = {"workspace": workspace, "filter_eps": FILTER_EPS}
    return Case(f"fused-filter-{workspace}", "fused", settings=settings)


def comparison(methods: list[str], workspaces: list[str]) -> list[Case]:
    """Every method, and `fused` within each workspace; within the first workspace also with the filter.

    Raises `T1Error` for an empty list of workspaces, and for a workspace that is not a number of bytes above 0.
    """
    require(bool(workspaces), "no workspace to compare in; allowed: one or more, such as '512MiB'")
    for workspace in workspaces:
        require(parse_bytes(workspace) > 0, f"bad workspace {workspace!r}: it must be above 0")
    plain = [Case(m, m, gradients=g) for m in methods for g in (False, True)]
    return [*plain, *map(fused, workspaces), filtered(workspaces[0])]


def unique(cases: list[Case]) -> list[Case]:
    """Each case once, in order."""
    return list({case.key: case for case in cases}.values())


def parse_shape(text: str) -> Shape:
    """A shape from "name tokens vocabulary hidden", such as "G 8192 256000 2304"."""
    words = text.split()
    whole = len(words) == 4 and all(word.isdecimal() and int(word) >= 1 for word in words[1:])
    require(whole, f"bad shape {text!r}; allowed: a name, then tokens, vocabulary and hidden size, each >= 1")
    require(words[0].isalnum(), f"bad name of a shape {words[0]!r}; allowed: letters and digits")
    return Shape(words[0], *map(int, words[1:]))


def parse_bar(text: str, shapes: list[str]) -> Bar:
    """A bar from "shapes kind workspace limit", such as "G,Q both 512MiB 1.12"; kinds are `KINDS`."""
    words = text.split()
    require(len(words) == 4, f"bad bar {text!r}; allowed: shapes, kind, workspace, limit, such as 'G both 1GiB 1.06'")
    names, kind, workspace, limit = words
    for name in names.split(","):
        choose("shape in a bar:", name, shapes)
    choose("kind of bar", kind, KINDS)
    require(parse_bytes(workspace) > 0, f"bad bar {text!r}: the workspace must be above 0")
    try:
        value = float(limit)
    except ValueError:
        raise T1Error(f"bad bar {text!r}: {limit!r} is no number") from None
    require(value > 0, f"bad bar {text!r}: the limit must be above 0")
    return Bar(tuple(names.split(",")), kind, workspace, value)


@dataclass(frozen=True)
class Plan:
    """All that is measured on random data: every method on every shape, next to it `fused` within each of the
    `compared` workspaces; `fused` within each `tight` workspace on its shape only; and the bars' cases on their shapes.
    """

    shapes: tuple[Shape, ...]
    methods: tuple[str, ...]
    bars: tuple[Bar, ...]
    compared: tuple[str, ...] = ()
    tight: tuple[tuple[str, str], ...] = ()

    def tight_cases(self, shape: str) -> list[Case]:
        """`fused` within the tight workspaces of a shape."""
        return [fused(workspace) for name, workspace in self.tight if name == shape]

    def cases(self, shape: str) -> list[Case]:
        """The cases of a shape, each once; a bar on a change also adds the same head without the change."""
        found = [Case(m, m, gradients=g) for m in self.methods for g in (False, True)]
        found += [*map(fused, self.compared), *self.tight_cases(shape)]
        for bar in self.bars:
            if shape in bar.shapes:
                found += [fused(bar.workspace)] if bar.over == "plain" else []
                found += bar.cases()
        return unique(found)


def parse_tight(text: str, shapes: list[str]) -> tuple[str, str]:
    """(shape, workspace) from a text such as "G 62MiB"."""
    words = text.split()
    require(len(words) == 2, f"bad tight workspace {text!r}; allowed: shape and workspace, such as 'G 62MiB'")
    choose("shape of a tight workspace:", words[0], shapes)
    require(parse_bytes(words[1]) > 0, f"bad tight workspace {text!r}: it must be above 0")
    return words[0], words[1]


def make_plan(
    shapes: list[str], methods: list[str], bars: list[str], compared: list[str] = (), tight: list[str] = ()
) -> Plan:
    """Parse a notebook's lists. Raises `T1Error` for the first invalid entry, before anything is measured."""
    parsed = [parse_shape(text) for text in shapes]
    names = [shape.name for shape in parsed]
    require(bool(names), "shapes is empty; allowed: one or more, such as 'G 8192 256000 2304'")
    require(len(set(names)) == len(names), f"shapes {', '.join(names)}: a name may be given once")
    for method in methods:
        choose("method", method, [*HEADS, *PEERS])
    tight_ones = tuple(parse_tight(text, [*names, MODEL]) for text in tight)
    bounds = tuple(parse_bar(text, names) for text in bars)
    return Plan(tuple(parsed), tuple(methods), bounds, tuple(compared), tight_ones)
