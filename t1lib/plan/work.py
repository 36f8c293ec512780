"""What a training step of a model needs: counts of parameters, bytes and operations, found without training it."""

import copy
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from t1lib.errors import require
from t1lib.heads.chunked import bytes_held as chunked_bytes
from t1lib.heads.fused_plan import bytes_held as fused_bytes
from t1lib.models import first_trained, split, trial

MODES = ("gpu", "ckpt", "slide", "fsdp")  # that are predicted, the plainest first; fsdp in one process, with offload
SLACK = 64 * 2**20  # bytes that any step on a GPU holds in addition: cuBLAS's workspaces, small tensors
BACKWARD = 3.1  # tensors of a layer's inner width that its backward holds beside its saved activations (measured)
SHORT = 2048  # tokens per row at which attention reaches half its rate over long rows, on an H200 (measured)
DtypesOf = Callable[[torch.Tensor], dict[str, torch.dtype]]
_SAVED: dict[tuple, int] = {}  # what `saved_bytes` has found


@dataclass(frozen=True)
class Work:
    """A step of a model: the counts from which memory and time follow."""

    layers: int
    layer: int  # parameters of a layer that stream, or stay as a whole
    outer: int  # trained parameters outside the layers whose state may travel
    hidden: int  # width of a layer's input
    itemsize: int  # bytes of a weight, and of an activation
    saved: int  # bytes per token that a layer's backward needs beyond its weights
    state: int  # bytes of optimizer state per parameter
    tokens: int  # per step
    micro_tokens: int  # that a layer computes at a time
    workspace: int  # bytes of the output layer
    together: bool = True  # whether updates wait for the last gradient, or each layer's only for its own
    accumulates: bool = False  # whether gradients of earlier backwards may be there when a streamed step begins
    streams: bool = True  # whether layers run one at a time, as in mode slide, each on the whole batch
    frozen: int = 0  # layers that are not trained; they count as the first ones
    aside: int = 0  # bytes that never leave the device: buffers; all other parameters, with gradients and state
    wide: int = 0  # bytes of a layer's largest activation, over the tokens that it computes at a time
    beside: float = 0  # bytes that a layer's backward holds beside its saved activations
    head: int = 0  # parameters of the output layer, if the loss uses it
    tied: int = 0  # of them, those that are also the embedding's, and trained
    in_place: bool = False  # whether the embedding's gradient is added to that which the output layer made of them
    largest: int = 0  # elements of the largest parameter
    vocabulary: int = 0  # rows of the output layer
    logits: int = 0  # bytes of the output layer's largest tensor, if that is the logits as a whole
    head_frozen: bool = False  # whether the output layer's weight is, so that its gradient is not computed
    capped: bool = False  # whether logits have a softcap, whose derivative the backward needs
    head_moves: float = 0.0  # bytes per logit that the output layer moves beside its three products
    attention: int = 0  # operations per token of a layer's forward without weights, at the rate of long rows
    graphed: bool = False  # whether layers that are streamed and recomputed run as CUDA graphs
    masters: bool = False  # whether 16-bit parameters have whole float32 masters
    split: bool = False  # whether they have split ones; whole in layers of which the CPU updates a share
    cuda: bool = True  # whether on a GPU: only there do plans let layers' state travel to the device

    @property
    def pieces(self) -> int:
        """Micro-batches per step."""
        return -(-self.tokens // self.micro_tokens)

    @property
    def live(self) -> int:
        """Tokens whose activations exist at once, and whose loss the output layer computes at a time."""
        return self.tokens if self.streams else self.micro_tokens


def launch_bound(params: int) -> int:
    """The most tokens for which launching a layer of `params` parameters eagerly takes the host longer than running it,
    or moving its state, takes an H200. Measured for layers of 15.7 and 50 million parameters (docs/log.md)."""
    return min(max(2**36 // max(params, 1), 1024), 4096)  # 2**36 tokens × parameters


def saved_by(call: Callable[[], object], weights: Iterable[torch.Tensor]) -> int:
    """Bytes that autograd saves for the backward of `call()`, other than those of `weights`."""
    known = {p.untyped_storage().data_ptr() for p in weights}
    found: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no other gets its address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:  # sparse ones have no storage, and little memory
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
        return tensor.detach()  # a saved output would refer to its own graph, in a cycle that is never freed

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda t: t):
        call()
    return sum(storage.nbytes() for start, storage in found.items() if start not in known)


def saved_bytes(config: PreTrainedConfig, dtype: torch.dtype, seq: int) -> int:
    """Bytes per token that a decoder layer saves for a backward beside weights, in rows of `seq`: one layer is run."""
    key = type(config), config.to_json_string(use_diff=False), config._attn_implementation, dtype, seq
    if key not in _SAVED:
        small = copy.deepcopy(config)
        small.num_hidden_layers, small.vocab_size, small.pad_token_id = 1, 8, None  # padding must be in the vocabulary
        if getattr(small, "layer_types", None):
            small.layer_types = small.layer_types[:1]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(small, dtype=dtype)
        _SAVED[key] = saved_by_layer(model.to_empty(device="cpu"), dtype, seq)  # with arbitrary weights
    return _SAVED[key]


def saved_by_layer(model: PreTrainedModel, dtype: torch.dtype, seq: int) -> int:
    """The same for a model whose layers may have more than their configuration says, such as adapters. The first layer
    runs on rows of 4 to 16 tokens; its bytes are extrapolated. Most grow with the tokens, some with their square if
    attention keeps its matrix (PyTorch's own does not), and some, such as those made of weights, not at all."""
    parts, found = split(model), []
    layer = parts.layers[first_trained(parts.layers)]
    for tokens in (4, 8) if parts.base.config._attn_implementation == "sdpa" else (4, 8, 16):
        found.append(saved_by(trial(parts, layer, dtype, 1, tokens)[1], layer.parameters()))
    first = (found[1] - found[0]) / 4
    square = ((found[2] - found[1]) / 8 - first) / 12 if len(found) == 3 else 0
    return round(first + square * (seq - 12))


def work_of(
    model: nn.Module, dtypes_of: DtypesOf, *, rows: int, seq: int, micro_batch: int | None = None,
    workspace: int = 2**29, together: bool = True, layers: Sequence[nn.Module] | None = None,
    trained: Collection[nn.Parameter] | None = None, hidden: int | None = None, saved: int | None = None,
    cuda: bool = True, accumulates: bool = False, streamed: Container[str] | None = None,
    travelling: Collection[nn.Parameter] | None = None, beside: float | None = None, wide: int | None = None,
) -> Work:  # fmt: skip
    """The counts for a step of `rows` × `seq` tokens in mode slide, `micro_batch` rows at a time.

    dtypes_of   gives dtypes of a parameter's optimizer state, such as `OptimizerSpec.state_dtypes`
    layers      the stack of layers, all alike (None: a Hugging Face decoder's own)
    trained     the parameters that are trained (None: those that require a gradient)
    streamed    names of each layer's parameters that stream (None: all), all of them trained in a layer, or none
    travelling  trained parameters outside the layers whose state may travel (None: all)
    hidden      with `saved`, `beside` and `wide`, as in `Work` (None: by the configuration, and by running a layer)
    """
    config = getattr(model, "config", None)
    layers = split(model).layers if layers is None else layers
    require(len(layers) > 0, "a model without layers; allowed: a stack of one layer or more")
    trained = {p for p in model.parameters() if p.requires_grad} if trained is None else set(trained)
    own = [[p for n, p in layer.named_parameters() if streamed is None or n in streamed] for layer in layers]
    numel, dtype, state = sum(p.numel() for p in own[0]), own[0][0].dtype, dtypes_of(own[0][0])
    outer = trained.difference(*own) if travelling is None else {*travelling}
    rest = {*model.parameters()}.difference(outer, *own)
    aside = sum(tensor.nbytes for tensor in (*rest, *(p for p in rest if p.requires_grad), *model.buffers()))
    aside += sum(p.numel() * kind.itemsize for p in rest & trained for kind in dtypes_of(p).values())
    output = getattr(model, "get_output_embeddings", lambda: None)()
    vocabulary, width = (0, 0) if output is None else output.weight.shape
    both = output is not None and output.weight is model.get_input_embeddings().weight and output.weight in trained
    tied = output.weight.nbytes // dtype.itemsize if both else 0
    micro_tokens = min(micro_batch or rows, rows) * seq
    if wide is None:
        inner = max((max(p.shape) for p in layers[0].parameters() if p.dim() > 1), default=0)
        wide = micro_tokens * inner * dtype.itemsize
    heads = getattr(config, "num_attention_heads", 0)  # none in a model without such a configuration
    attention = heads and heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Work(
        layers=len(layers), layer=numel, outer=sum(p.numel() for p in outer), hidden=hidden or config.hidden_size,
        itemsize=dtype.itemsize, saved=saved_bytes(config, dtype, seq) if saved is None else saved,
        state=sum(kind.itemsize for kind in state.values()), tokens=rows * seq, micro_tokens=micro_tokens,
        workspace=workspace * (output is not None), together=together, accumulates=accumulates, aside=aside,
        wide=wide, beside=BACKWARD * wide if beside is None else beside, tied=tied,
        frozen=sum(trained.isdisjoint(params) for params in own), head=vocabulary * width,
        largest=max(p.nbytes for p in model.parameters()) // dtype.itemsize, vocabulary=vocabulary,
        head_frozen=output is not None and output.weight not in trained,
        # Two products, half of whose entries count, and more for the lower rate of short rows; windows are ignored.
        attention=2 * (seq + SHORT) * attention, graphed=cuda and micro_tokens <= launch_bound(numel), cuda=cuda,
        masters="master" in state, split="low" in state, capped=bool(getattr(config, "final_logit_softcapping", None)),
    )  # fmt: skip


def in_mode(work: Work, mode: str, head: str) -> Work:
    """The same work in a mode with a head. The output layer takes a micro-batch at a time; in mode slide, the batch."""
    streams = mode == "slide"
    together, graphed = work.together or mode == "fsdp", work.graphed and streams
    return with_head(replace(work, streams=streams, together=together, graphed=graphed), head)


def with_head(
    work: Work, head: str, workspace: int | None = None, chunks: int | None = None, by: str = "sequence",
    tail: str | None = None, filter_eps: float | None = None, **_: object,
) -> Work:  # fmt: skip
    """The same work with an output layer, by the head's own options. Its `workspace`, which was the default budget of
    `fused`, becomes the peak bytes held beyond inputs and gradients, and `head_moves` the bytes moved per logit beside
    the products (by notebook cce). Raises `T1Error` for a workspace that is too small for `fused`.

    full      per logit, in float32: the log-probability and two gradients; the weight's comes when these are freed
    chunked   per logit of a chunk: the logit in 16 bits and in 32, and its gradient; in both, a softcap's derivative
    torch     likewise, or later a copy of the gradients; its small chunks each read and write the weight's gradient
    fused     what its plan in the workspace, or in so many chunks, needs, no more than full; on a CPU, others run
    """
    if head == "fused" and not work.cuda:
        head = "chunked" if filter_eps is None else "full"
    tokens, vocabulary, size, trained = work.live, work.vocabulary, work.itemsize, not work.head_frozen
    held, moved, count = work.workspace if workspace is None else workspace, 1.5, tokens * vocabulary
    if head == "full":
        held, moved = max((12 + 4 * work.capped) * count - work.head * size * trained, 0), 20.0
    elif head == "chunked":  # with a workspace, as large chunks as fit into it
        chunks = chunks if workspace is None else 1
        need, moved = chunked_bytes(tokens, vocabulary, work.hidden, size, by, chunks, work.capped), 10.5
        held = need if workspace is None else min(need, workspace)
    elif head == "torch":
        share = -(-tokens // -(-vocabulary // work.hidden))
        rows = max(2 ** (share - 1).bit_length() // 2, 1)  # of its chunks, a power of two
        held = max(8 * rows * vocabulary, (work.head + tokens * work.hidden) * size)
        moved = 2 * size * work.hidden / rows
    elif size <= 4:
        need = fused_bytes(tokens, vocabulary, work.hidden, size, held, chunks, tail, filter_eps is None, trained)
        held = min(need, need if chunks else held, 12 * count)
    logits, in_place = 4 * count * (head == "full"), head in ("chunked", "fused")
    return replace(work, workspace=held, logits=logits, head_moves=moved, in_place=in_place)
