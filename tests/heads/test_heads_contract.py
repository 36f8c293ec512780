"""The contract: messages for bad arguments, workspace, autocast, statistics, helpers."""

import pytest
import torch
import torch.nn.functional as F
from head_cases import OPTION_SETS, assert_close, options, problem, run

from t1lib.errors import T1Error, UnavailableError
from t1lib.heads import DEFAULT_HEAD, HEADS, linear_cross_entropy, next_token_targets, parse_bytes

N, V, D = 5, 257, 16
GOOD = problem(N, V, D, dtype=torch.float32)
BAD = {
    "input a list": ({"input": [1.0]}, "input must be a tensor, got list"),
    "input integer": ({"input": torch.ones(N, D, dtype=torch.int64)}, "input must be floating point, got torch.int64"),
    "input scalar": ({"input": torch.tensor(1.0)}, r"input must have shape \(…, D\)"),
    "weight 3-D": ({"linear_weight": torch.ones(V, 1, D)}, r"linear_weight must have shape \(V, D\), got \(257, 1, 16"),
    "no classes": ({"linear_weight": torch.ones(0, D)}, r"linear_weight must have at least one row, got \(0, 16\)"),
    "D differs": ({"linear_weight": torch.ones(V, D + 1)}, r"\(5, 16\).*\(257, 17\) must agree"),
    "dtype differs": ({"linear_weight": GOOD.w.half()}, "linear_weight is torch.float16, input torch.float32"),
    "bias dtype": ({"linear_bias": GOOD.b.double()}, "linear_bias is torch.float64, input torch.float32"),
    "bias shape": ({"linear_bias": torch.ones(V - 1)}, r"linear_bias must have shape \(257,\), got \(256,\)"),
    "target device": ({"target": GOOD.target.to("meta")}, "target is on meta, input on cpu"),
    "target float": ({"target": torch.ones(N)}, "target must hold integer class indices, got torch.float32"),
    "target bool": ({"target": torch.ones(N, dtype=torch.bool)}, "integer class indices, got torch.bool"),
    "target probabilities": ({"target": torch.ones(N, V) / V}, "class probabilities"),
    "target shape": ({"target": GOOD.target[:-1]}, r"target must have shape \(5,\).*got \(4,\)"),
    "target too large": ({"target": torch.full((N,), V)}, r"target must lie in \[0, 257\).*-100; got 257"),
    "target negative": ({"target": torch.full((N,), -1)}, r"target must lie in \[0, 257\).*-100; got -1"),
    "ignore_index": ({"ignore_index": 1.5}, "ignore_index must be an int of 64 bits, got 1.5"),
    "class weight shape": ({"weight": torch.ones(V + 1)}, r"weight must have shape \(257,\), got \(258,\)"),
    "class weight dtype": (
        {"weight": torch.ones(V, dtype=torch.int64)},
        "weight must be floating point, got torch.int",
    ),
    "class weight grad": ({"weight": torch.ones(V, requires_grad=True)}, "weight requires a gradient"),
    "token_weight shape": ({"token_weight": torch.ones(N, 1)}, r"token_weight must have .*\(5,\), got \(5, 1\)"),
    "token_weight grad": ({"token_weight": torch.ones(N, requires_grad=True)}, "token_weight requires a gradient"),
    "reduction": ({"reduction": "avg"}, "unknown reduction 'avg'; allowed: mean, sum, none"),
    "smoothing": ({"label_smoothing": 1.5}, r"label_smoothing must be a number in \[0, 1\], got 1.5"),
    "softcap": ({"softcap": 0.0}, "softcap must be None or a finite number > 0, got 0.0"),
    "z_loss": ({"z_loss": float("nan")}, "z_loss must be a finite number >= 0, got nan"),
    "filter_eps": ({"filter_eps": 1.0}, r"filter_eps must be None or a number in \(0, 1\), got 1.0"),
    "workspace": ({"workspace": -1}, "bad size -1; allowed"),
    "head": ({"head": "fulll"}, "unknown head 'fulll'.*Did you mean 'full'"),
    "option": ({"head": "full", "chunks": 2}, "unknown option 'chunks' for head 'full'; its options: none"),
    "chunked's option": ({"head": "chunked", "chunk": 2}, "unknown option 'chunk' .*its options: by, chunks"),
    "by": ({"head": "chunked", "by": "token"}, "unknown by 'token'; allowed: sequence, vocabulary"),
    "chunks": ({"head": "chunked", "chunks": 0}, "chunks must be an int >= 1, got 0"),
    "chunks and workspace": ({"head": "chunked", "chunks": 2, "workspace": "1GiB"}, "chunks or workspace, not both"),
    "torch softcap": ({"head": "torch", "softcap": 1.0}, "has no softcap; heads that take it: full, chunked"),
    "torch z_loss": ({"head": "torch", "z_loss": 1.0}, "has no z_loss"),
    "torch filter_eps": ({"head": "torch", "filter_eps": 0.1}, "has no filter_eps"),
    "torch workspace": ({"head": "torch", "workspace": "1GiB"}, "has no workspace"),
    "torch return_stats": ({"head": "torch", "return_stats": True}, "has no return_stats"),
    "torch smoothing": ({"head": "torch", "label_smoothing": 0.1}, "has no label_smoothing with chunked=True"),
}


def needs_torch_head(head):
    if head == "torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this PyTorch has no linear_cross_entropy")


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    change, message = BAD[case]
    needs_torch_head(change.get("head"))
    arguments = {"input": GOOD.e, "linear_weight": GOOD.w, "target": GOOD.target} | change
    with pytest.raises(T1Error, match=message):
        linear_cross_entropy(**arguments)


def test_torch_head_says_when_it_is_unavailable(monkeypatch):
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(UnavailableError, match=r"PyTorch 2\.13"):
        linear_cross_entropy(GOOD.e, GOOD.w, GOOD.target, head="torch")


def test_registry_and_default():
    assert list(HEADS) == ["full", "chunked", "fused", "torch"] and DEFAULT_HEAD in HEADS
    default = linear_cross_entropy(GOOD.e, GOOD.w, GOOD.target)
    assert default == HEADS[DEFAULT_HEAD](GOOD.e, GOOD.w, GOOD.target)


def test_a_registered_head_is_dispatched_to(monkeypatch):
    monkeypatch.setitem(HEADS, "fused", lambda *operands, **kwargs: kwargs)
    got = linear_cross_entropy(GOOD.e, GOOD.w, GOOD.target, head="fused", z_loss=0.5, block=3)
    assert got["z_loss"] == 0.5 and got["block"] == 3 and "head" not in got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("own", [{}, {"by": "vocabulary"}], ids=str)
def test_workspace_picks_a_chunk_or_says_the_least(own, name, dtype):
    p = problem(37, V, D, dtype=dtype)
    kwargs = options(name, p) | own
    with pytest.raises(T1Error, match=r"workspace of 100 bytes is too small.*the least that works is \d+ bytes") as e:
        run("chunked", p, workspace=100, **kwargs)
    least = int(str(e.value).split("works is ")[1].split()[0])
    one = run("chunked", p, workspace=least, **kwargs)
    assert_close(one, run("chunked", p, chunks=37 if not own else V, **kwargs), 1e-9)
    with pytest.raises(T1Error):
        run("chunked", p, workspace=least - 1, **kwargs)
    assert_close(run("chunked", p, workspace="1GiB", **kwargs), run("chunked", p, chunks=1, **kwargs), 1e-9)


def test_full_checks_its_workspace():
    p = problem(37, V, D, dtype=torch.bfloat16)
    need = 37 * V * 12
    with pytest.raises(T1Error, match=f"the least that works is {need} bytes"):
        run("full", p, workspace=need - 1)
    assert_close(run("full", p, workspace=need), run("full", p), 0.0)


@pytest.mark.parametrize("head", ["full", "chunked", "torch"])
def test_autocast_casts_as_linear_does(head):
    needs_torch_head(head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(head, GOOD)
    half = GOOD.to(torch.bfloat16)
    want = run(head, half)
    assert all(g.dtype == torch.float32 for g in got)
    assert_close(got, want, 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = run(head, GOOD.to(torch.float64))
    assert exact[0].dtype == torch.float64


@pytest.mark.parametrize("own", [{}, {"by": "vocabulary", "chunks": 3}], ids=str)
@pytest.mark.parametrize("name", OPTION_SETS)
def test_statistics(own, name):
    p = problem(36, V, D)
    p.target[:3] = F.linear(p.e, p.w, p.b).argmax(-1)[:3]
    kwargs = options(name, p) | {"linear_bias": p.b, "return_stats": True, "reduction": "none"}
    if "token_weight" in kwargs:
        kwargs["token_weight"] = kwargs["token_weight"].view(4, 9)
    e, target = p.e.view(4, 9, D).requires_grad_(), p.target.view(4, 9)
    z = F.linear(e.detach(), p.w, p.b)
    z = z if "softcap" not in kwargs else kwargs["softcap"] * torch.tanh(z / kwargs["softcap"])
    valid, safe = target != -100, target.clamp(min=0)
    for head, extra in (("full", {}), ("chunked", own)):
        loss, stats = linear_cross_entropy(e, p.w, target, head=head, **kwargs, **extra)
        torch.testing.assert_close(stats.lse, z.logsumexp(-1) * valid)
        logprob = z.log_softmax(-1).gather(-1, safe[..., None])[..., 0]
        torch.testing.assert_close(stats.logprob, logprob * valid)
        assert torch.equal(stats.correct, (z.argmax(-1) == target) & valid) and stats.correct.sum() >= 3
        assert loss.requires_grad and not any(value.requires_grad for value in stats)


@pytest.mark.parametrize("head, own", [("full", {}), ("chunked", {}), ("chunked", {"by": "vocabulary", "chunks": 2})])
def test_ties_count_as_correct(head, own):
    _, stats = linear_cross_entropy(
        torch.ones(4, 1), torch.tensor([[2.0], [1.0], [2.0]]), torch.tensor([0, 1, 2, -100]),
        head=head, return_stats=True, **own,
    )  # fmt: skip
    assert stats.correct.tolist() == [True, False, True, False]


def test_ignore_index_none_is_pytorchs_default():
    assert linear_cross_entropy(GOOD.e, GOOD.w, GOOD.target, ignore_index=None) == linear_cross_entropy(
        GOOD.e, GOOD.w, GOOD.target
    )


@pytest.mark.parametrize(
    "text, size",
    [
        (0, 0),
        (7, 7),
        ("7", 7),
        ("7B", 7),
        ("256MiB", 2**28),
        ("1.5GiB", 3 * 2**29),
        ("2 KiB", 2048),
        ("2GB", 2 * 10**9),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5.1GiB", "3 miles", "256mib", 1.5, None, True, -2])
def test_parse_bytes_refuses(text):
    with pytest.raises(T1Error, match=r"bad size .*allowed: .*MiB"):
        parse_bytes(text)


def test_next_token_targets():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    got = next_token_targets(ids)
    assert got.tolist() == [[2, 3, -100], [5, 6, -100]] and got.dtype == torch.int64
    assert next_token_targets(ids[0], ignore_index=0).tolist() == [2, 3, 0]
    assert next_token_targets(ids[0, :1]).tolist() == [-100]
    for bad in (ids.float(), ids[None], ids[0, 0]):
        with pytest.raises(T1Error, match="ids must"):
            next_token_targets(bad)
