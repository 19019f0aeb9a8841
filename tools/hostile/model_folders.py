"""Hostile and odd Hugging Face folders: converted there and back, whatever they hold.

Each case makes a small model, damages it in up to three ways, and runs `from-hf`, `to-hf` and `verify`. A case fails if anything
but a TitanError is raised, if something is left of a refused conversion, if weights change, if a file from outside the folder,
code or a key that names code is published, or if a flipped byte of an export is called whole.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.check.verify import examine
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.assets import README, is_carried
from titan_ckpt.converters.hf.config import spec_from_hf
from titan_ckpt.converters.hf.digests import DIGESTS
from titan_ckpt.converters.hf.folder import INDEX, open_hf
from titan_ckpt.converters.hf.safetensors_header import encode_header
from titan_ckpt.converters.models.families import FAMILIES, expected_tensors
from titan_ckpt.errors import TitanError
from tools.hostile.outcome import Outcome

SECRET = b"root:x:a secret of this machine"
CASE_LIMIT_S = 20.0
NAMES = (
    "LICENSE",
    "README.md",
    "NOTICE",
    "config.json",
    "tokenizer.json",
    "generation_config.json",
    "chat_template.jinja",
)
FAMILY_NAMES = ("llama", "qwen2", "qwen3", "mistral")
CODE = {
    "auto_map": {"AutoModel": "evil.Evil"},
    "custom_pipelines": {"p": {"impl": "evil.P"}},
    "trust_remote_code": True,
}
SHARDS = (
    "../secret",
    "/etc/passwd",
    "https://host/x.safetensors",
    "C:\\x",
    "a\x1b[2Jb",
    "",
    ".",
    "config.json",
    "sub/x.safetensors",
)
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EXTRA = (
    "modeling_evil.py",
    "pytorch_model.bin",
    "optimizer.pt",
    "LICENSE.py",
    "x.pkl",
    "data/train.sh",
    "adapter_config.json",
    "a\nb",
)
QUANTISED: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq"},
    {"quant_method": "mxfp4"},
    {"load_in_8bit": True},
    {},
)


@dataclass(slots=True)
class Case:
    """A model folder under construction: `must_fail` if a change leaves nothing that may be converted."""

    random: random.Random
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    num_files: int
    files: dict[str, bytes] = field(default_factory=dict)
    after: list[Callable[[], None]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    must_fail: bool = False

    @property
    def secret(self) -> Path:
        """A file outside the folder."""
        return self.folder.parent / "secret"

    def write(self) -> None:
        """Write the folder, then apply the changes to its files."""
        self.folder.mkdir(parents=True)
        self.secret.write_bytes(SECRET)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        for name, data in self.files.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(data)
        names = sorted(self.tensors)
        shares = [names[n :: self.num_files] for n in range(self.num_files)]
        weight_map: dict[str, str] = {}
        for n, share in enumerate(shares):
            file = (
                f"model-{n + 1:05d}-of-{self.num_files:05d}.safetensors" if self.num_files > 1 else "model.safetensors"
            )
            weight_map |= dict.fromkeys(share, file)
            rows = [(name, str(self.tensors[name].dtype)[6:], tuple(self.tensors[name].shape)) for name in share]
            data = b"".join(_raw(self.tensors[name]) for name in share)
            (self.folder / file).write_bytes(encode_header(rows, {"format": "pt"}) + data)
        if self.num_files > 1:
            (self.folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        for change in self.after:
            change()


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def make_case(seed: int, folder: Path) -> Case:
    """The case of a seed: any family, dtype, tying and number of files, and what is wrong with it."""
    rng = random.Random(seed)
    family, dtype = rng.choice(FAMILY_NAMES), rng.choice(FLOATS)
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family].architecture], "model_type": family, "vocab_size": 24, "hidden_size": 16,
        "intermediate_size": 20, "num_hidden_layers": rng.choice((1, 2)), "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 4, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64, "hidden_act": "silu",
        "tie_word_embeddings": rng.random() < 0.3, "torch_dtype": str(dtype)[6:],
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(spec_from_hf(config, "case"))
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    case = Case(rng, folder, config, tensors, rng.choice((1, 1, 2, 3)))
    case.files = {"LICENSE": b"MIT", "tokenizer.json": b"{}", README: b"---\nlicense: mit\n---\n"}
    for change in rng.sample(CHANGES, rng.choice((0, 1, 1, 1, 2, 3))):
        case.changes.append(change.__name__.removeprefix("_"))
        change(case)
    return case


def _link_out(case: Case) -> None:
    name, kind = (
        case.random.choice(NAMES),
        case.random.choice(("relative", "absolute", "two steps", "hidden", "hard", "folder")),
    )
    case.must_fail = True

    def apply() -> None:
        path = case.folder / name
        path.unlink(missing_ok=True)
        if kind == "hard":
            path.hardlink_to(case.secret)
            return
        (case.folder / ".git").mkdir(exist_ok=True)
        (case.folder / ".git" / "config").write_bytes(SECRET)
        if kind == "two steps":
            (case.folder / "step").symlink_to("../secret")
        if kind == "folder":
            (case.folder / "up").symlink_to("..")
        targets = {"absolute": str(case.secret), "two steps": "step", "hidden": ".git/config", "folder": "up/secret"}
        path.symlink_to(targets.get(kind, "../secret"))

    case.after.append(apply)


def _not_a_file(case: Case) -> None:
    name, kind = case.random.choice(NAMES), case.random.choice(("pipe", "folder", "device", "dangling"))
    case.must_fail = True

    def apply() -> None:
        path = case.folder / name
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero" if kind == "device" else "nowhere")

    case.after.append(apply)


def _shard_elsewhere(case: Case) -> None:
    case.num_files, case.must_fail = 2, True
    shard = case.random.choice(SHARDS)

    def apply() -> None:
        index = json.loads((case.folder / INDEX).read_text())
        index["weight_map"][case.random.choice(sorted(index["weight_map"]))] = shard
        (case.folder / INDEX).write_text(json.dumps(index))

    case.after.append(apply)


def _integers(case: Case) -> None:
    name, case.must_fail = case.random.choice(sorted(case.tensors)), True
    case.tensors[name] = (case.tensors[name].float() * 64).to(case.random.choice(INTS))


def _another_float(case: Case) -> None:
    name = case.random.choice(sorted(case.tensors))
    case.tensors[name] = case.tensors[name].to(case.random.choice((*FLOATS, torch.float8_e4m3fn)))


def _tensor_lost(case: Case) -> None:
    case.must_fail = True
    del case.tensors[case.random.choice(sorted(case.tensors))]


def _tensor_more(case: Case) -> None:
    case.must_fail = True
    name = case.random.choice(
        ("model.layers.7.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.qweight", "visual.x", "a\x1b[31m")
    )
    case.tensors[name] = torch.zeros(3)


def _tensor_turned(case: Case) -> None:
    case.must_fail = True
    name = "model.layers.0.self_attn.k_proj.weight"
    if name in case.tensors:
        case.tensors[name] = case.tensors[name].T.contiguous()


def _head_differs(case: Case) -> None:
    case.config["tie_word_embeddings"] = case.must_fail = True
    embedding = case.tensors.get("model.embed_tokens.weight", torch.ones(24, 16))
    case.tensors["lm_head.weight"] = (embedding.float() + 1).to(embedding.dtype)


def _quantised(case: Case) -> None:
    case.must_fail = True
    key = case.random.choice(("quantization_config", "compression_config", "quantization"))
    case.config[key] = case.random.choice(QUANTISED)


def _other_config(case: Case) -> None:
    case.must_fail = True
    key = case.random.choice(
        ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
    )
    case.config[key] = case.random.choice((7, 0, -1, "x", None, 10**30, [], 3.5, True))


def _code(case: Case) -> None:
    case.config |= CODE
    case.files["tokenizer_config.json"] = json.dumps(CODE | {"name_or_path": "/home/me"}).encode()
    case.files |= dict.fromkeys(case.random.sample(EXTRA, 3), b"import os")


def _broken_json(case: Case) -> None:
    case.must_fail = True
    text = case.random.choice(
        (b"", b"[", b"nul", b"\xff\xfe", b'{"a": NaN}', b"[" * 5000, b'{"auto_map": 1, "auto_map": 2}')
    )
    name = case.random.choice(("config.json", "tokenizer_config.json"))

    def apply() -> None:
        path = case.folder / name
        if not path.is_symlink() and (path.is_file() or not path.exists()):
            path.write_bytes(text)

    case.after.append(apply)


def _truncated(case: Case) -> None:
    case.must_fail = True
    cut = case.random.random()

    def apply() -> None:
        path = sorted(case.folder.glob("*.safetensors"))[0]
        os.truncate(path, int(path.stat().st_size * cut))

    case.after.append(apply)


def _case_twins(case: Case) -> None:
    case.files |= {"license": b"another", "License": b"a third"}


CHANGES = [
    _link_out, _not_a_file, _shard_elsewhere, _integers, _another_float, _tensor_lost, _tensor_more, _tensor_turned,
    _head_differs, _quantised, _other_config, _code, _broken_json, _truncated, _case_twins,
]  # fmt: skip


def run_models(seed: int, seconds: float) -> Outcome:
    """Cases from `seed` on, for `seconds`."""
    outcome = Outcome(part="models")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run_case(seed * 1_000_003 + outcome.cases, outcome)
    return outcome


def run_case(seed: int, outcome: Outcome) -> None:
    """One case; adds to `outcome`."""
    outcome.cases += 1
    top = Path(tempfile.mkdtemp(prefix="titan-ckpt-hostile-"))
    started = time.monotonic()
    try:
        case = make_case(seed, top / "in")
        case.write()
        for problem in _problems(case, top, outcome):
            outcome.failures.append(f"seed {seed}: {case.changes}: {problem}")
        if time.monotonic() - started > CASE_LIMIT_S:
            outcome.failures.append(f"seed {seed}: took more than {CASE_LIMIT_S} s")
    except Exception:  # noqa: BLE001 - whatever it is, it is a finding
        outcome.failures.append(f"seed {seed}: {traceback.format_exc(limit=-4)}")
    finally:
        shutil.rmtree(top)


def _problems(case: Case, top: Path, outcome: Outcome) -> list[str]:
    try:
        import_hf(str(case.folder), str(top / "run"))
        export_hf(str(top / "run"), str(top / "out"), max_shard_bytes=4_000)
    except TitanError as error:
        outcome.counts["refused"] += 1
        found = [] if case.must_fail else [f"refused for nothing: {error}"]
        left = [path for name in ("run", "out") for path in (top / name).rglob("*") if path.is_file()]
        found += [f"left behind: {left}"] if left else []
        return found
    outcome.counts["converted"] += 1
    found = ["should have been refused"] if case.must_fail else []
    return [*found, *_published(case, top), *_not_whole(case, top / "out", outcome)]


def _published(case: Case, top: Path) -> list[str]:
    """What an export should not hold."""
    found = []
    for path in sorted(path for name in ("run", "out") for path in (top / name).rglob("*") if path.is_file()):
        data = path.read_bytes()
        found += [f"{path.name} holds a secret"] if SECRET in data else []
        found += [f"{path.name} names code"] if b"evil" in data or b"import os" in data else []
        found += [f"{path.name} names this machine"] if path.parent.name == "out" and str(top).encode() in data else []
    for path in (top / "out").iterdir():
        if not (is_carried(path.name) or path.suffix == ".safetensors" or path.name in (INDEX, DIGESTS)):
            found.append(f"{path.name} was exported")
    model = open_hf(str(top / "out"))
    for name, tensor in case.tensors.items():
        stored = model.tensors[name]
        data = model.store.read(model.files[model.file_of[name]], stored.offset, stored.length)
        found += [f"{name} has other bytes"] if data != _raw(tensor) else []
    return found + (
        [f"other tensors: {set(model.tensors) ^ set(case.tensors)}"] if set(model.tensors) != set(case.tensors) else []
    )


def _not_whole(case: Case, out: Path, outcome: Outcome) -> list[str]:
    """Flip one byte of any file but README.md: `verify` must not call the export whole."""
    if examine(str(out), read_data=True).is_ok is not True:
        return ["an export is not called whole"]
    path = case.random.choice(sorted(path for path in out.iterdir() if path.name != README and path.stat().st_size))
    data = bytearray(path.read_bytes())
    at = case.random.randrange(len(data))
    data[at] ^= 1 << case.random.randrange(8)
    path.write_bytes(data)
    outcome.counts["flips"] += 1
    try:
        is_ok = examine(str(out), read_data=True).is_ok
    except TitanError:
        return []
    return [f"{path.name}: byte {at} flipped, and called whole"] if is_ok else []
