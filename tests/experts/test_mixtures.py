"""Mixtures of experts: the router's choices, grouped products, balancing losses, and meshes with expert parallelism."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_ckpt.cli.main import main
from titan_ckpt.converters.models.families import check_spec
from titan_ckpt.converters.models.spec import spec_of
from titan_ckpt.errors import ConfigError, PlanError
from titan_ckpt.trainer.config.toml_records import as_dict, resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, check_config, resolve_mesh
from titan_ckpt.trainer.launch.estimate import TrainingEstimate, estimate_training
from titan_ckpt.trainer.model.decoder import ModelConfig, decoder
from titan_ckpt.trainer.model.experts import (
    BIAS,
    BalanceConfig,
    Experts,
    ExpertsConfig,
    MixtureOfExperts,
    Router,
)
from titan_ckpt.trainer.model.families import Family
from titan_ckpt.trainer.model.plan import plan_of
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits, expert_axes, mesh_spec
from tools.paths import CONFIGS
from tools.rank_pool import RankPool
from tools.training.curves import (
    BALANCED,
    BALANCING,
    DEEPSEEK,
    GPT_OSS,
    MIXTURE,
    SMALL,
    Curve,
    CurveCase,
    relative_error,
    single,
    train,
)
from tools.training.mesh_cases import EXPERT_MESHES, mesh

FP32_BAR = 1e-5
MOE = ["model.family=qwen3_moe", "model.qk_norm=true", "model.experts={number=8, per_token=2, ffn_dim=32}"]
EIGHT = ExpertsConfig(number=8, per_token=2, ffn_dim=12)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def filled(module: nn.Module, std: float = 0.3) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std, generator=generator)
    return module


def hidden(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def expected(run: CurveCase) -> Curve:
    return single(replace(run, parallel=ParallelConfig()))


def case(name: str, **options: Any) -> CurveCase:
    is_balanced = len(name) % 2 == 0  # every second mesh trains the model with all options
    balance = BALANCING if is_balanced else BalanceConfig()
    return CurveCase(
        model=BALANCED if is_balanced else MIXTURE, balance=balance, parallel=EXPERT_MESHES[name], **options
    )


@pytest.mark.dist
@pytest.mark.parametrize("name", EXPERT_MESHES)
def test_expert_parallelism_gives_the_curve_of_one_process(ranks: RankPool, name: str) -> None:
    check_curve(ranks, case(name, steps=3))


@pytest.mark.dist
@pytest.mark.parametrize("name", ["ep x tp", "ep x ring", "ep x etp"])
@pytest.mark.parametrize("model", [DEEPSEEK, GPT_OSS], ids=lambda model: model.family)
def test_families_train_on_meshes_as_in_one_process(ranks: RankPool, model: ModelConfig, name: str) -> None:
    balance = BALANCING if model is DEEPSEEK else BalanceConfig()
    check_curve(ranks, CurveCase(model=model, balance=balance, parallel=EXPERT_MESHES[name], steps=2))


@pytest.mark.dist
@pytest.mark.parametrize("name", ["ep over cp and fsdp", "ep x tp", "ep x etp"])
def test_muon_of_each_expert_is_that_of_one_process(ranks: RankPool, name: str) -> None:
    check_curve(ranks, CurveCase(model=MIXTURE, parallel=EXPERT_MESHES[name], rule="muon", steps=3))


def check_curve(ranks: RankPool, run: CurveCase) -> None:
    curves = ranks.run(train, run)
    assert all(curve == curves[0] for curve in curves), "ranks disagree"
    reference = expected(run)
    assert relative_error(curves[0].losses, reference.losses) <= FP32_BAR
    assert relative_error(curves[0].norms, reference.norms) <= 10 * FP32_BAR
    assert curves[0].loads == reference.loads


def test_experts_without_a_token_still_get_a_gradient() -> None:
    experts: Experts = filled(Experts(EIGHT, 16))
    y_ND = experts.compute(torch.empty(0, 16, requires_grad=True), torch.zeros(8, dtype=torch.int64))
    y_ND.sum().backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None and not weight.grad.any() for weight in experts.parameters())


def test_a_mixture_is_the_weighted_sum_of_its_experts() -> None:
    mixture: MixtureOfExperts = filled(MixtureOfExperts(EIGHT, 16))
    x_BSD = hidden(2, 5, 16)
    weights_TK, experts_TK = mixture.gate(x_BSD)
    one = torch.tensor([1])
    for token, x_D in enumerate(x_BSD.flatten(0, 1)):
        each = []
        for expert, weight in zip(experts_TK[token], weights_TK[token], strict=True):
            counts_E = torch.zeros(8, dtype=torch.int64).scatter_(0, expert[None], one)
            each.append(weight * mixture.experts.compute(x_D[None], counts_E)[0])
        torch.testing.assert_close(mixture(x_BSD).flatten(0, 1)[token], torch.stack(each).sum(0))


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_group_limited_choices_are_those_of_deepseek_v3() -> None:
    modeling = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    transformers = importlib.import_module("transformers")
    config = transformers.DeepseekV3Config(
        hidden_size=32, n_routed_experts=32, num_experts_per_tok=6, n_group=8, topk_group=3, moe_intermediate_size=16,
        n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    theirs = modeling.DeepseekV3MoE(config)
    ours = Router(
        ExpertsConfig(
            number=32, per_token=6, ffn_dim=16, scores="sigmoid", correction_bias=True, groups=8, groups_per_token=3, scale=2.5,
        ),
        32,
    )  # fmt: skip
    ours.weight.copy_(hidden(32, 32))
    theirs.gate.weight.copy_(ours.weight)
    getattr(ours, BIAS).copy_(0.1 * hidden(32, seed=3))
    theirs.gate.e_score_correction_bias.copy_(getattr(ours, BIAS))
    x_BSD = hidden(2, 256, 32, seed=4)
    _, weights, indices = theirs.gate(x_BSD)
    weights_TK, experts_TK = ours(x_BSD)
    order, their_order = experts_TK.argsort(), indices.argsort()
    assert torch.equal(experts_TK.gather(1, order), indices.gather(1, their_order))
    torch.testing.assert_close(weights_TK.gather(1, order), weights.gather(1, their_order))


def test_the_bias_moves_towards_experts_with_too_few_tokens() -> None:
    router = Router(replace(EIGHT, correction_bias=True), 16)
    router.balance = BalanceConfig(bias_rate=0.5)
    router.add_load(torch.tensor([9, 1, 5, 5, 5, 5, 5, 5]))
    assert getattr(router, BIAS).tolist() == [-0.5, 0.5, 0, 0, 0, 0, 0, 0]
    assert router.total_E.tolist() == [9, 1, 5, 5, 5, 5, 5, 5]


def test_the_bias_changes_choices_but_no_weights() -> None:
    router: Router = filled(Router(replace(EIGHT, correction_bias=True, norm_topk_prob=False), 16))
    getattr(router, BIAS)[3] = 100.0
    weights_TK, experts_TK = router(hidden(1, 7, 16))
    assert (experts_TK == 3).any(dim=1).all()
    assert weights_TK.max() <= 1.0


def balancing_gradient(balance: BalanceConfig, scale: float) -> Tensor:
    router: Router = filled(Router(EIGHT, 16))
    router.balance, router.loss_scale = balance, scale
    weights_TK, _ = router(hidden(2, 9, 16))
    (0.0 * weights_TK).sum().backward()
    assert router.weight.grad is not None
    return router.weight.grad


def test_the_z_loss_is_the_squared_log_sum_of_every_token() -> None:
    router: Router = filled(Router(EIGHT, 16))
    logits_TE = hidden(2, 9, 16).flatten(0, 1) @ router.weight.T
    (expected_ED,) = torch.autograd.grad(0.25 * 0.1 * logits_TE.logsumexp(-1).square().sum(), router.weight)
    torch.testing.assert_close(balancing_gradient(BalanceConfig(z_loss=0.1), 0.25), expected_ED)


def test_the_balance_loss_is_that_of_each_sequence() -> None:
    router: Router = filled(Router(EIGHT, 16))
    losses = []
    for x_SD in hidden(2, 9, 16):
        scores_SE = (x_SD @ router.weight.T).softmax(-1)
        counts_E = torch.bincount(scores_SE.topk(2).indices.flatten(), minlength=8)
        f_E, p_E = counts_E * 8 / (2 * 9), scores_SE.mean(0)  # arXiv 2412.19437, equations 18 to 20
        losses.append(9 * 0.1 * (f_E * p_E).sum())
    (expected_ED,) = torch.autograd.grad(0.5 * torch.stack(losses).sum(), router.weight)
    torch.testing.assert_close(balancing_gradient(BalanceConfig(balance_loss=0.1), 0.5), expected_ED)


def test_only_training_forwards_are_counted() -> None:
    router: Router = filled(Router(EIGHT, 16))
    router(hidden(1, 5, 16))
    with torch.no_grad():
        router(hidden(1, 5, 16))
    assert router.take_load().sum() == 10
    assert router.take_load().sum() == 0


def test_recomputed_blocks_count_their_tokens_once() -> None:
    run = CurveCase(model=MIXTURE, steps=2)
    again = single(replace(run, parallel=mesh(activation_checkpoint="full")))
    assert again == expected(run)
    assert sum(again.loads["model.layers.0.mlp.gate"]) == 2 * 8 * 48 * 2  # steps, samples, tokens, experts per token


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_token": 9}, r"per_token 9, but a token can reach 8 experts"),
        ({"groups": 3}, r"8 experts / 3 groups is not whole"),
        ({"groups": 8}, r"a group of 1 is chosen by its group_best = 2 best experts"),
        ({"groups": 2, "groups_per_token": 3}, r"groups_per_token 3 of 2 groups"),
        ({"groups": 4, "per_token": 3}, r"per_token 3, but a token can reach 2 experts"),
        ({"number": 0}, r"model.experts.number = 0: must be from 1"),
        ({"alpha": 2.0}, r"model.experts.alpha = 2.0 has no effect without model.experts.limit"),
        ({"dense_layers": 4}, r"dense_layers = 4 leaves no layer of 4 for experts"),
    ],
)
def test_experts_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder(replace(MIXTURE, experts=replace(EIGHT, **changes)))


def test_family_and_experts_must_agree() -> None:
    with pytest.raises(
        ConfigError, match=r"family qwen3_moe is a mixture of experts: give the table \[model.experts\]"
    ):
        decoder(replace(MIXTURE, experts=None))
    with pytest.raises(ConfigError, match=r"family llama has none; families with experts: mixtral, qwen3_moe"):
        decoder(replace(SMALL, experts=EIGHT))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"float8": "rowwise"}, r"float8=rowwise with experts: set float8=none"),
        ({"dp_shard": 16, "ep": 16}, r"model.layers.0.mlp.experts.gate_up_proj: experts 8 / ep 16 = 0.50"),
    ],
)
def test_what_experts_cannot_do_yet_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    parallel = ParallelConfig(**{"dp_shard": 1} | options)
    with pytest.raises(ConfigError, match=message):
        check_fits(decoder(MIXTURE), parallel, mesh_spec(parallel, parallel.dp_shard), seq_len=48, microbatch_size=8)


def test_ep_without_experts_or_ranks_is_refused() -> None:
    two = ParallelConfig(ep=2)
    with pytest.raises(ConfigError, match=r"ModelSpec.experts is empty, so ep=2 has nothing to divide"):
        check_fits(decoder(SMALL), two, mesh_spec(two, 2), seq_len=48, microbatch_size=8)
    with pytest.raises(ConfigError, match=r"ep 3 does not divide dp_shard 4: the ranks of ep"):
        mesh_spec(ParallelConfig(ep=3), 4)


@pytest.mark.parametrize(
    ("parallel", "world", "spec", "axes"),
    [
        (mesh(ep=2, cp=2), 4, "cp=2,ep=2", "ep"),  # of dp_shard, where that divides
        (mesh(ep=4, cp=2), 4, "cp=2,ep=2", "cp+ep"),
        (mesh(ep=4, cp=4), 4, "cp=4", "cp+ep"),
        (mesh(ep=4, cp=2), 16, "dp_shard=2,cp=2,ep=4", "ep"),
        (mesh(ep=4, cp=2, dp_replicate=2), 8, "dp_replicate=2,cp=2,ep=2", "cp+ep"),
    ],
)
def test_ep_takes_ranks_of_dp_shard_then_those_of_cp(
    parallel: ParallelConfig, world: int, spec: str, axes: str
) -> None:
    found = mesh_spec(parallel, world)
    assert (str(found), expert_axes(parallel, found)) == (spec, axes)
    assert found.degree(axes) == parallel.ep


@pytest.mark.parametrize(("ep", "cp", "world"), [(2, 4, 4), (16, 2, 8), (3, 2, 4), (0, 2, 4), (-2, 2, 4)])
def test_ep_over_a_part_of_cp_is_refused(ep: int, cp: int, world: int) -> None:
    with pytest.raises(ConfigError, match=rf"ep {ep} does not divide dp_shard .*, nor is it cp {cp} x what divides"):
        mesh_spec(ParallelConfig(ep=ep, cp=cp, dp_shard=world // cp), world)


def test_modules_named_as_experts_must_have_one_number_of_them() -> None:
    spec = decoder(MIXTURE)
    with pytest.raises(
        ConfigError, match=r"model.layers.0.self_attn \(ModelSpec.experts\) has no attribute `exchange`"
    ):
        plan_of(replace(spec, experts="model.layers.*.self_attn"))

    def build() -> nn.Module:
        model = spec.build()
        experts: Any = model.get_submodule("model.layers.0.mlp.experts")
        experts.bias = nn.Parameter(torch.empty(3))
        return model

    with pytest.raises(ConfigError, match=r"weights must all be \[experts, ...\]; they are .*experts.bias': \(3,\)"):
        plan_of(replace(spec, build=build))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["experts.z_loss=0.1"], r"\[experts\] is set, but the decoder of family llama has no router"),
        (MOE + ["experts.bias_rate=0.1"], r"set model.experts.correction_bias = true"),
        (MOE + ["lora.rank=4", "resume.from=base"], r"adapters of mixtures are not done yet"),
        (MOE + ["experts.balance_loss=-1.0"], r"experts.balance_loss = -1.0: must be at least 0"),
    ],
)
def test_settings_without_effect_or_not_done_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(resolve(TrainConfig, str(CONFIGS / "debug.toml"), sets).config)


def test_the_estimate_divides_experts_by_ep_and_not_by_tp() -> None:
    def estimate(*sets: str) -> TrainingEstimate:
        config = resolve(TrainConfig, str(CONFIGS / "moe.toml"), sets).config
        return estimate_training(config, resolve_mesh(config, 4))

    whole, by_ep, by_tp = estimate("mesh.dp_replicate=4"), estimate("mesh.ep=4"), estimate("mesh.tp=4")
    assert by_ep.memory.parameters == whole.memory.parameters / 4
    assert by_ep.memory.gathered < estimate().memory.gathered
    experts = 8 * 3 * 256 * 192 * 8  # layers, matrices, sizes, experts
    assert by_tp.memory.parameters == 4 * ((whole.num_parameters - experts) / 4 + experts)
    assert [t.name for t in by_ep.traffic if t.name.startswith("EP")] == ["EP all-to-all"]
    over_cp = estimate("mesh.ep=4", "mesh.cp=4")
    assert (over_cp.memory.parameters, over_cp.memory.gathered) == (by_ep.memory.parameters, by_ep.memory.gathered)
    assert "EP all-to-all" in [t.name for t in over_cp.traffic]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"scores": "sigmoid"}, r"MixtralForCausalLM has no experts.scores = sigmoid"),
        ("qwen3_moe", {"shared": 1}, r"Qwen3MoeForCausalLM has no experts.shared = 1"),
        ("qwen3_moe", {"correction_bias": True}, r"Qwen3MoeForCausalLM has no experts.correction_bias = True"),
    ],
)
def test_an_export_refuses_what_the_family_cannot_express(
    family: Family, changes: dict[str, Any], message: str
) -> None:
    experts = replace(EIGHT, **changes)
    model = replace(MIXTURE, family=family, qk_norm=family != "mixtral", ffn_dim=experts.ffn_dim, experts=experts)
    with pytest.raises(PlanError, match=message):
        check_spec(spec_of({"model": as_dict(model)}, "test"))


def test_a_run_that_spreads_no_tokens_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "moe.toml")
    small = ["train.steps=1", "model.n_layers=1", "data.seq_len=32", "save.every=9"]
    for number, balance in enumerate(("0.0", "0.01")):
        sets = [*small, f"experts.balance_loss={balance}", f"save.url={tmp_path / str(number)}"]
        assert main(["train", config, *(word for text in sets for word in ("--set", text))]) == 0
        assert ("set experts.balance_loss" in capfd.readouterr().err) is (balance == "0.0")
