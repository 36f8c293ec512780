"""What a training step of a model needs: counts of parameters, bytes and operations, found without training it."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PreTrainedConfig

from t1lib.heads.fused_plan import Device, Shape, bytes_needed, device_of, early_from, plan
from t1lib.machine import SHORT
from t1lib.train.graphs import launch_bound
from t1lib.train.models import layer_arguments, split
from t1lib.train.optim import DEVICE_PIECE
from t1lib.train.placement import place_of, spare_modules
from t1lib.train.spec import OptimizerSpec, state_bytes

HEADS = {"full": 20.0, "chunked": 10.5, "fused": 1.5}  # bytes moved per logit, beside the products (by notebook cce)
CHUNKS = 8  # default of head `chunked`
SLACK = 64 * 2**20  # on a GPU: cuBLAS's workspaces, small tensors


@dataclass(frozen=True)
class Work:
    """A step of a model: the counts from which memory and time follow. Bytes unless said otherwise.

    layer, outer     parameter counts: of one layer, and of all trained parameters outside the layers
    still            count of frozen parameters outside the layers that are held on the device
    head             parameter count of the output layer, if the loss uses it
    largest          element count of the largest parameter
    vocabulary       rows of the output layer
    logits           bytes of the output layer's largest tensor, if that is the logits as a whole
    attention        operations per token of a layer's forward that involve no weights, at the rate of long rows
    head_moves       bytes per logit that the output layer moves, beside its three products
    slack            bytes that any step holds in addition to all this
    graphed          whether layers that are streamed and recomputed run as CUDA graphs
    masters          whether parameters have whole (not split) float32 masters
    beside           additional bytes of state per parameter that the host updates beside the device (`spec.spec_of`)
    widening         whether updates on the device widen 16-bit gradients, a piece at a time
    on_device        share of slide's layers that are updated on the device; their optimizer state, if any, travels
    whole_head       whether the output layer cannot be computed in pieces of the vocabulary
    saved            bytes per token that a layer's backward needs beyond its weights
    inner            width of a layer's widest activation, in elements per token
    state            bytes of optimizer state per parameter, on the device and on the host
    """

    layers: int
    layer: int
    outer: int
    hidden: int
    itemsize: int
    saved: int
    state: int
    tokens: int
    micro_tokens: int
    workspace: int
    together: bool
    inner: int = 0
    still: int = 0
    head: int = 0
    largest: int = 0
    vocabulary: int = 0
    logits: int = 0
    attention: int = 0
    head_moves: float = 0.0
    slack: int = SLACK
    graphed: bool = False
    masters: bool = False
    beside: int = 0
    widening: bool = False
    on_device: float = 0.0
    whole_head: bool = False

    @property
    def params(self) -> int:
        return self.layers * self.layer + self.outer + self.still

    @property
    def widened(self) -> int:
        """Bytes of the widened gradients in an update on the device."""
        return 4 * min(self.largest, DEVICE_PIECE) * self.widening

    @property
    def travelling(self) -> int:
        """Bytes of optimizer state per parameter that cross the link, if its layer is updated on the device."""
        return self.state if self.on_device else 0

    @property
    def pieces(self) -> int:
        """Micro-batches per step."""
        return -(-self.tokens // self.micro_tokens)


_SAVED: dict[tuple, tuple[float, float]] = {}


def saved_bytes(config: PreTrainedConfig, dtype: torch.dtype, seq: int) -> int:
    """Bytes per token that a decoder layer saves for its backward, excluding weights, in rows of `seq` tokens.

    Found by running a layer on two short rows, once for each configuration: the bytes per token grow only if attention
    keeps its matrix.
    """
    key = type(config), config.to_json_string(use_diff=False), config._attn_implementation, dtype
    if key not in _SAVED:
        _SAVED[key] = _saved_by_running(config, dtype, 16), _saved_by_running(config, dtype, 32)
    few, more = _SAVED[key]
    return round(few + (more - few) / 16 * (seq - 16))


def _saved_by_running(config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> float:
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = 1, 8
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small, dtype=dtype)
    parts = split(model.to_empty(device="cpu"))  # with arbitrary weights
    layer = parts.layers[0]
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.untyped_storage().data_ptr()
        if start not in weights:
            found[start] = tensor  # kept alive, so that no other tensor gets its address
        return tensor

    hidden = torch.zeros(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    hidden, arguments = layer_arguments(parts, hidden)
    with saved_tensors_hooks(pack, lambda t: t):
        out = type(layer).forward(layer, hidden, **arguments[0])
    del out
    return sum(t.untyped_storage().nbytes() for t in found.values()) / tokens


def work_of(
    model: nn.Module, spec: OptimizerSpec, *, rows: int, seq: int, micro_batch: int | None = None,
    workspace: int = 2**29, together: bool = False, train: str = "all", loss: str = "cross_entropy",
    embedding: str = "host", graph_tokens: int | None = None, update: str = "auto", host_share: float = 1 / 3,
    cuda: bool = True, overlap_update: bool = True,
) -> Work:  # fmt: skip
    """The counts for a step of `rows` × `seq` tokens, `micro_batch` rows at a time, on a GPU (`cuda`) or not; the other
    arguments as in `SlideTrainer`."""
    parts, dtype = split(model), next(model.parameters()).dtype
    wide = spec.master_weights and dtype != torch.float32
    whole = overlap_update and (train != "marked" or all(p.requires_grad for p in parts.layers.parameters()))
    update = place_of(update, spec, together, cuda, whole)
    in_layers = {id(p) for p in parts.layers.parameters()}
    outside = {p for p in model.parameters() if id(p) not in in_layers}
    trained = {p for p in outside if train == "all" or (train == "marked" and p.requires_grad)}
    spare = spare_modules(parts, train, loss, embedding)
    held = {p for module in model.modules() if module not in spare for p in module.parameters(recurse=False)}
    with_head = loss == "cross_entropy"
    micro_tokens = min(micro_batch or rows, rows) * seq
    few = launch_bound(parts.layers[0]) if graph_tokens is None else graph_tokens
    return Work(
        layers=len(parts.layers), layer=_count(parts.layers[0].parameters()), outer=_count(trained),
        still=_count((outside - trained) & held), head=_count(parts.head.parameters()) * with_head,
        hidden=model.config.hidden_size, inner=_widest(parts.layers[0]), itemsize=dtype.itemsize,
        saved=saved_bytes(model.config, dtype, seq),
        state=state_bytes(torch.empty(1, dtype=dtype), spec), tokens=rows * seq,
        micro_tokens=micro_tokens, workspace=workspace * with_head, together=together,
        largest=max(p.numel() for p in model.parameters()), vocabulary=parts.head.out_features * with_head,
        attention=_attention(model.config, seq), graphed=micro_tokens <= few,
        masters=wide and not spec.split_master, widening=wide and not (cuda and spec.name == "adamw"),
        beside=2 * (wide and spec.split_master and update == "both"),
        on_device={"host": 0.0, "device": 1.0, "both": 1 - host_share}[update],
    )  # fmt: skip


def _attention(config: PreTrainedConfig, seq: int) -> int:
    """Operations per token of causal attention's two products, half of whose entries count, plus `SHORT` for the lower
    rate of short rows; sliding windows are ignored."""
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    return 2 * (seq + SHORT) * width


def _widest(layer: nn.Module) -> int:
    return max((max(p.shape) for p in layer.parameters() if p.dim() == 2), default=0)


def _count(params: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


def with_head(work: Work, head: str) -> Work:
    """The same work with the given output layer; on entry, `work.workspace` is the budget of head `fused`."""
    logits = 4 * work.micro_tokens * work.vocabulary * (head == "full")
    return replace(work, workspace=head_bytes(head, work), logits=logits, head_moves=HEADS.get(head, HEADS["fused"]))


def head_bytes(head: str, work: Work) -> int:
    """Peak bytes that a head holds beyond its inputs and gradients.

    full      per logit, in float32: the log-probability, its gradient, and the gradient before the softmax; the
              weight's gradient is made when these are freed
    chunked   per logit of a chunk: the logit in 16 bits and in 32, and its gradient
    fused     what its plan within the workspace needs, no more than full (less if `chunked` runs in its place)

    Raises `T1Error` for a workspace that is too small for head `fused`.
    """
    logits = work.micro_tokens * work.vocabulary
    if head == "full":
        return max(12 * logits - work.head * work.itemsize * (work.outer > 0), 0)
    if head == "chunked":
        return 8 * logits // CHUNKS
    return min(_fused_bytes(work), 12 * logits) if logits and work.itemsize <= 4 else work.workspace


def _fused_bytes(work: Work) -> int:
    """For this GPU, or for an H200 if there is none."""
    device = device_of(torch.device("cuda")) if torch.cuda.is_available() else Device("hopper", 132)
    dtype = torch.bfloat16 if work.itemsize == 2 else torch.float32
    shape = Shape(work.micro_tokens, work.vocabulary, work.hidden, dtype, de=True, dw=True)
    early = work.workspace >= early_from(work.micro_tokens, work.vocabulary, work.hidden, work.itemsize, cuda=True)
    chosen = plan("early" if early else "late", shape, work.workspace, device)
    return min(work.workspace, bytes_needed(shape, chosen, early))
