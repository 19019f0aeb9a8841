"""The decoder against transformers; its masks, sizes, products and initial weights."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box
from titan_ckpt.trainer.model.attention import FlexAttend
from titan_ckpt.trainer.model.decoder import Decoder, ModelConfig, decoder, initial
from titan_ckpt.trainer.model.linear import ONEDNN_PRODUCTS, Linear
from titan_ckpt.trainer.model.loss import IGNORED, TokenLoss
from titan_ckpt.trainer.model.plan import plan_of
from titan_ckpt.trainer.model.rope import RopeConfig, RopeScaling, rotate, rotation
from titan_ckpt.trainer.model.stages import BlockRange, build_stage
from titan_ckpt.trainer.parallel.initialize import _indices, fill_normal, normal
from titan_ckpt.trainer.seams.model import Normal
from tools.training.hf_shapes import SHAPES, from_hf, to_hf

SEQ_LEN = 640
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "factor": 2.0}
QWEN3_MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "head_dim": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_theta": 500_000.0}),
    "llama3 scaling": ("llama", {"rope_theta": 500_000.0, "rope_scaling": LLAMA3}),
    "linear scaling": ("llama", {"rope_scaling": LINEAR}),
    "yarn scaling": ("qwen2", {"rope_scaling": YARN}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "smollm2, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3, free head size": ("qwen3", {"head_dim": 24}),
    "mistral, window": ("mistral", {"sliding_window": 100}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3 moe": ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3 moe, plain weights": ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": False}),
}
TINY = ModelConfig(vocab_size=96, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64)


def hf_model(family: str, options: dict[str, Any]) -> Any:
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(
        family,
        **{
            "vocab_size": 320,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
            "initializer_range": 0.15,  # far from zero, to expose a wrong rotation
        }
        | options,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    return model


def load(config: ModelConfig, weights: dict[str, Tensor]) -> Decoder:
    decoder = Decoder(config)
    decoder.load_state_dict(weights, strict=True)
    return decoder.eval()


def tiny(config: ModelConfig = TINY, seed: int = 0) -> Decoder:
    model = Decoder(config)
    for fqn, parameter in model.named_parameters():
        values = initial(fqn, config.n_layers)
        fill_normal(parameter, fqn, values.std if isinstance(values, Normal) else 0.5, seed, MeshSpec(), {})
    return model


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_equal_those_of_transformers(name: str) -> None:
    reference = hf_model(*FAMILIES[name])
    decoder = load(from_hf(reference.config.to_dict()), reference.state_dict())
    tokens_BS = torch.randint(0, 320, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    expected_BSV, found_BSV = reference(tokens_BS).logits, decoder(tokens_BS)
    assert expected_BSV.std() > 0.5
    assert (found_BSV - expected_BSV).abs().max() <= 1e-3


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_survives_the_way_to_hugging_face_and_back(name: str) -> None:
    transformers = importlib.import_module("transformers")
    family, options = FAMILIES[name]
    config = from_hf(hf_model(family, options).config.to_dict())
    through = transformers.AutoConfig.for_model(**to_hf(config)).to_dict()
    assert from_hf(through) == ModelConfig(
        **{f: getattr(config, f) for f in config.__slots__} | {"head_dim": config.head_size}
    )


def test_a_family_that_is_not_covered_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_type 'gpt2' is not one of llama"):
        from_hf({"model_type": "gpt2"})


def test_a_shape_hugging_face_cannot_express_is_refused() -> None:
    config = ModelConfig(vocab_size=8, dim=8, n_layers=1, n_heads=1, n_kv_heads=1, ffn_dim=8, qk_norm=True)
    with pytest.raises(ConfigError, match=r"model.qk_norm=True: .*LlamaForCausalLM"):
        to_hf(config)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("smollm2-135m", 0.1345), ("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85)],
)
def test_published_shapes_build_on_the_meta_device(name: str, billions: float) -> None:
    with torch.device("meta"):
        decoder = Decoder(SHAPES[name])
    assert math.isclose(sum(p.numel() for p in decoder.parameters()) / 1e9, billions, rel_tol=1e-3)


def test_documents_do_not_see_each_other() -> None:
    decoder = tiny()
    first, second = torch.randint(0, 96, (2, 1, 16), generator=torch.Generator().manual_seed(0))
    packed_BS = torch.cat([first, second], dim=1)
    documents_BS = torch.tensor([[0] * 16 + [1] * 16])
    together_BSV = decoder(packed_BS, documents=documents_BS)
    torch.testing.assert_close(together_BSV[:, 16:], decoder(second), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together_BSV[:, :16], decoder(first), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_equals_sdpa_with_documents_and_a_window() -> None:
    config = ModelConfig(
        vocab_size=96, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=64, head_dim=16, sliding_window=20
    )
    decoder = tiny(config)
    tokens_BS = torch.randint(0, 96, (2, 128), generator=torch.Generator().manual_seed(0))
    documents_BS = (torch.arange(128) // 50).expand(2, -1)
    flex = FlexAttend(20)
    flex.kernel = flex_attention  # uncompiled: compiling takes 15 s
    with torch.no_grad():
        expected_BSV = decoder(tokens_BS, documents=documents_BS)
        for layer in decoder.model.layers.values():
            layer.self_attn.__dict__["attend"] = flex
        found_BSV = decoder(tokens_BS, documents=documents_BS)
    torch.testing.assert_close(found_BSV, expected_BSV, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_loss_and_gradients_equal_those_of_whole_logits(chunk_tokens: int) -> None:
    decoder = tiny()
    tokens_BS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(0))
    labels_BS = tokens_BS.roll(-1, dims=1)
    labels_BS[:, -3:] = IGNORED
    logits_BSV = decoder(tokens_BS)
    expected = torch.nn.functional.cross_entropy(
        logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    expected.backward()  # type: ignore[no-untyped-call]
    expected_grads = {fqn: p.grad for fqn, p in decoder.named_parameters()}
    decoder.zero_grad()
    assert decoder.lm_head is not None
    decoder.lm_head.loss = TokenLoss(chunk_tokens=chunk_tokens)
    loss = decoder(tokens_BS, labels_BS)
    loss.backward()
    torch.testing.assert_close(loss.squeeze(), expected)
    torch.testing.assert_close({fqn: p.grad for fqn, p in decoder.named_parameters()}, expected_grads)


def test_stages_in_a_row_compute_what_the_whole_does() -> None:
    whole = tiny()
    plan = plan_of(decoder(TINY))
    first, last = (build_stage(plan, BlockRange(i, i + 1)).to_empty(device="cpu") for i in range(2))
    for stage in (first, last):
        stage.load_state_dict({fqn: p for fqn, p in whole.state_dict().items() if fqn in stage.state_dict()})
    tokens_BS = torch.arange(24).view(2, 12)
    torch.testing.assert_close(last(first(tokens_BS)), whole(tokens_BS))


def test_the_generator_gives_a_box_what_it_gives_the_whole() -> None:
    whole, box = (12, 10), Box((3, 4), (5, 6))
    values = normal(_indices(whole, Box.whole(whole), torch.device("cpu")), key=7)
    part = normal(_indices(whole, box, torch.device("cpu")), key=7)
    assert torch.equal(part, values[3:8, 4:10])


def test_the_generator_is_normal_and_its_streams_are_unrelated() -> None:
    index = torch.arange(200_000)
    a, b = normal(index, key=1), normal(index, key=2)
    assert abs(a.mean()) < 0.01
    assert abs(a.std() - 1.0) < 0.01
    assert abs((a**4).mean() - 3.0) < 0.1
    assert abs((a * b).mean()) < 0.01
    assert abs((a[1:] * a[:-1]).mean()) < 0.01


def test_a_seed_is_another_model() -> None:
    assert not torch.equal(tiny(seed=0).model.norm.weight, tiny(seed=1).model.norm.weight)


def test_yarn_without_an_attention_factor_derives_it() -> None:
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=64)
    config = ModelConfig(
        vocab_size=8, dim=32, n_layers=1, n_heads=1, n_kv_heads=1, ffn_dim=8, rope_scaling=scaling, family="llama"
    )
    assert from_hf(to_hf(config)).rope_scaling == scaling


def test_the_gradient_of_a_rotation_is_that_of_its_formula() -> None:
    by = rotation(RopeConfig(head_dim=8), torch.arange(5)[None])
    x_BSHK = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    a_BSHP, b_BSHP = x_BSHK.chunk(2, dim=-1)
    cos_BS1P, sin_BS1P = by[0][..., :4], by[1][..., 4:]
    turned = (a_BSHP * cos_BS1P - b_BSHP * sin_BS1P, b_BSHP * cos_BS1P + a_BSHP * sin_BS1P)
    formula_BSHK = torch.cat(turned, dim=-1)
    torch.testing.assert_close(rotate(x_BSHK, by), formula_BSHK)
    weights_BSHK = torch.arange(240.0).view(2, 5, 3, 8)
    expected = torch.autograd.grad((formula_BSHK * weights_BSHK).sum(), x_BSHK)
    torch.testing.assert_close(torch.autograd.grad((rotate(x_BSHK, by) * weights_BSHK).sum(), x_BSHK), expected)


PRODUCTS = [(1, 1, 1), (3, 5, 7), (64, 48, 160), (257, 96, 33)]


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: set[object] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


def layers(inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> tuple[Linear, nn.Linear]:
    """Ours and torch's with the same weights."""
    torch.manual_seed(0)
    theirs = nn.Linear(inputs, outputs, dtype=dtype)
    ours = Linear(inputs, outputs, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def gradients(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    """Output, and gradients of input, weight and bias."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.sin().sum().backward()
    return [y.detach(), *(t.grad for t in (x, layer.weight, layer.bias) if t.grad is not None)]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), PRODUCTS)
def test_output_and_gradients_equal_torchs(rows: int, inputs: int, outputs: int) -> None:
    ours, theirs = layers(inputs, outputs)
    x = torch.randn(2, rows, inputs)
    for mine, other in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "x", [torch.randn(2, 0, 8), torch.randn(8), torch.randn(8, 4).T, torch.randn(1, 1, 8).expand(3, 2, 8)]
)
def test_inputs_of_odd_shapes_and_strides_are_taken(x: Tensor) -> None:
    ours, theirs = layers(8, 5)
    for mine, other in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        torch.testing.assert_close(mine, other)


def test_only_fp32_is_multiplied_by_onednn() -> None:
    used = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with Operators() as calls:
            layers(8, 5, dtype)[0](torch.randn(2, 4, 8, dtype=dtype))
        used[dtype] = not calls.ops.isdisjoint(ONEDNN_PRODUCTS)
    assert used == {torch.float32: bool(ONEDNN_PRODUCTS), torch.bfloat16: False, torch.float64: False}


def test_a_frozen_weight_gets_no_gradient() -> None:
    ours, _ = layers(8, 5)
    ours.weight.requires_grad_(False)
    output, grad_x, grad_bias = gradients(ours, torch.randn(3, 8))
    assert (output.shape, grad_x.shape, grad_bias.shape) == ((3, 5), (3, 8), (5,))


def test_a_gradient_of_the_gradient_equals_torchs() -> None:
    x = torch.randn(6, 8)
    penalties = []
    for layer in layers(8, 5):
        points = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(points).square().sum(), points, create_graph=True)
        slope.square().sum().backward()  # type: ignore[no-untyped-call]
        assert layer.weight.grad is not None
        penalties.append(layer.weight.grad)
    torch.testing.assert_close(*penalties)


def test_a_compiled_layer_is_torchs_own() -> None:
    ours, theirs = layers(8, 5)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    x = torch.randn(3, 8)
    assert torch.equal(compiled(x), theirs(x))
