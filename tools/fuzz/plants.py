"""Faults to plant into the readers, to measure whether fuzzing finds them: `python -m scripts.fuzz --plants --minutes 2`.

Each is one change of one module's source, made as a process imports it. A family whose faults are not found within minutes
proves nothing by finding none of its own.
"""

# ruff: noqa: E501  (the changes quote code as it is)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_JSON, _FORMAT, _READ = "titan_ckpt.parsing.json_values", "titan_ckpt.format.", "titan_ckpt.debug.read."
_HF, _TUI = "titan_ckpt.converters.hf.", "titan_ckpt.tui.data."


@dataclass(frozen=True, slots=True)
class Plant:
    """In `module`, `old` becomes `new`; fuzzing `family` should notice."""

    family: str
    module: str
    old: str
    new: str

    def change(self, module: str, source: str) -> str:
        """The source of `module`, with the fault if it is the one meant."""
        if module != self.module:
            return source
        if source.count(self.old) != 1:
            raise ValueError(f"{module} holds {self.old!r} {source.count(self.old)} times, expected once")
        return source.replace(self.old, self.new)


def change_of(number: int | None) -> Callable[[str, str], str]:
    """What `Blocks.change` is to be; the source as it is for None."""
    return (lambda _, source: source) if number is None else PLANTS[number].change


PLANTS = (
    Plant("manifest", _FORMAT + "manifest_json", "_check(manifest, where)\n    return manifest", "return manifest"),
    Plant("manifest", _FORMAT + "manifest_json", "    if total > MAX_VALUES and", "    bytearray(total)\n    if total > MAX_VALUES and"),
    Plant("manifest", _JSON, "for number, value in enumerate(self.value):", "self.value[:] = [v for v in self.value if self.value.index(v) >= 0]\n        for number, value in enumerate(self.value):"),
    Plant("commit", _JSON, "except (ValueError, RecursionError) as error:\n        raise DamagedError(f\"{where}: not JSON", "except ValueError as error:\n        raise DamagedError(f\"{where}: not JSON"),
    Plant("metadata", _FORMAT + "dcp_read", "pickle.UnpicklingError, KeyError, TypeError,", "pickle.UnpicklingError, KeyError,"),
    Plant("metadata", "titan_ckpt.parsing.pickle_stack", "if self.keys > MAX_KEY_WEIGHT:", "if False:"),
    Plant("metadata", "titan_ckpt.parsing.pickle_stack", "if index > len(state.data):\n            raise state.fail(\"requests more memory than the file's length\")\n        state.memo[index] = state.stack[-1]\n\n    return", "state.memo[index] = state.stack[-1]\n\n    return"),
    Plant("blob", _FORMAT + "foreign_blob", "_NOT_A_TENSOR = (KeyError, pickle", "_NOT_A_TENSOR = (pickle"),
    Plant("blob", _FORMAT + "foreign_blob", "pickle.UnpicklingError, TypeError, IndexError", "pickle.UnpicklingError, IndexError"),
    Plant("box", _READ + "black_boxes", "except (ValueError, TypeError, KeyError):", "except (ValueError, KeyError):"),
    Plant("settings", "titan_ckpt.parsing.json_values", "    except RecursionError as error:\n        raise ValueError", "    except KeyError as error:\n        raise ValueError"),
    Plant("settings", "titan_ckpt.toml_text", "except (ValueError, RecursionError) as error:", "except ValueError as error:"),
    Plant("dump", _READ + "flight_recorder", "except (TypeError, KeyError, AttributeError, OverflowError,", "except (TypeError, KeyError, AttributeError,"),
    Plant("dump", _READ + "flight_recorder", "if isinstance(value, dict):\n            name", "if True:\n            name"),
    Plant("dump", _READ + "flight_recorder", "left -= len(parts)", "left -= 0"),
    Plant("dump_json", _READ + "flight_recorder", "isinstance(rank, int) and 0 <= rank <= MAX_RANK for", "0 <= rank <= MAX_RANK for"),
    Plant("dump_json", _READ + "flight_recorder", "if not isinstance(raw, dict) or not", "if not"),
    Plant("box", _READ + "black_boxes", "if type(key) is not int or not 0 <= key < MAX_KEY:", "if not 0 <= key:"),
    Plant("box", _READ + "black_boxes", "np.minimum(numbers, len(lookups[0]) - 1)", "numbers"),
    Plant("archive", _READ + "archives.members", "except (ValueError, OverflowError) as error:\n        raise DamagedError(f\"{text!r}", "except KeyError as error:\n        raise DamagedError(f\"{text!r}"),
    Plant("archive", _READ + "archives.members", "if header.size < 0:", "if False:"),
    Plant("log", _READ + "stacks", "return int(digits[:9])", "return int(digits)"),
    Plant("log", _TUI + "logs.lines", "    except ValueError:\n        return UNKNOWN_TIME", "    except KeyError:\n        return UNKNOWN_TIME"),
    Plant("log", _READ + "text.lines", "self._partial[:MAX_JOINED] + text", "self._partial + text"),
    Plant("packed", "titan_ckpt.parsing.unpacking", "if total > most:", "if False:"),
    Plant("packed", "titan_ckpt.parsing.unpacking", "zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)", "zstandard.ZstdDecompressor()"),
    Plant("packed", "titan_ckpt.parsing.unpacking", "except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError) as error:",
          "except (zstandard.ZstdError, lzma.LZMAError, OSError) as error:"),
    Plant("packed", "titan_ckpt.parsing.unpacking", "_FED_BYTES = (\n    16 << 10\n)", "_FED_BYTES = 1 << 30\n"),
    Plant("safetensors", _HF + "safetensors_header", "if len(offsets) != 2:", "if False:"),
    Plant("safetensors", _HF + "safetensors_header", "isinstance(metadata, dict) or not all(isinstance", "isinstance(metadata, dict) and not all(isinstance"),
    Plant("safetensors", _HF + "safetensors_header", "if len(shape) > MAX_DIMENSIONS:", "if False:"),
    Plant("safetensors", _JSON, "if name in seen:", "if [n for n, _ in pairs].count(name) > 1:"),
    Plant("safetensors", _JSON, "found: Any = self.value\n        if not isinstance(found, list) or", "found: Any = self.value\n        if"),
    Plant("value", "titan_ckpt.parsing.value_numpy", "if dtype.itemsize > _MAX_ITEM_BYTES:", "if False:"),
    Plant("value", "titan_ckpt.parsing.value_standard", "if len(_checked(text, str)) > MAX_DIGITS:", "if False:"),
    Plant("value", "titan_ckpt.parsing.values", "except RecursionError as error:", "except KeyError as error:"),
    Plant("torch_file", "titan_ckpt.parsing.torch_archive", "if found is None or found < needed:", "if found < needed:"),
    Plant("torch_file", "titan_ckpt.parsing.torch_archive", "if len(module) + len(name) > MAX_NAME:", "if False:"),
    Plant("torch_file", "titan_ckpt.parsing.torch_archive", "if not isinstance(pid, tuple) or len(pid) < 5 or", "if"),
    Plant("torch_file", "titan_ckpt.parsing.torch_archive", "if any(info.compress_type or info.flag_bits & 1 for info in records):", "if False:"),
    Plant("hugging_face", _HF + "config", "if value is not None and not is_right(value):", "if False:"),
    Plant("hugging_face", _HF + "config", "if config[\"num_hidden_layers\"] > MAX_LAYERS:", "if False:"),
    Plant("hugging_face", _HF + "config", "if not isinstance(kind, str) or kind not in", "if kind not in"),
    Plant("hugging_face", _HF + "config", "if \"factor\" not in fields:", "if False:"),
    Plant("chat", "titan_ckpt.trainer.data.conversations", "not in list(SHARE_GPT_ROLES)", "not in SHARE_GPT_ROLES"),
    Plant("chat", "titan_ckpt.trainer.data.conversations", "if not isinstance(found, list) or not found:", "if not found:"),
    Plant("chat", "titan_ckpt.trainer.data.chat_template", "except Exception as error:  # a template", "except ValueError as error:  # a template"),
    Plant("tokenizer", _HF + "assets", "entry[\"content\"].text(): entry[\"id\"].whole()", "entry.value[\"content\"]: entry[\"id\"].whole()"),
    Plant("tokenizer", _HF + "assets", "return next(((token, added[token]) for token in END_TOKENS if token in added), None)", "return \"\", list(added.values())[0]"),
    Plant("settings", "titan_ckpt.sharding.mesh", "degree.isascii() and degree.isdigit()", "degree.isdigit()"),
    Plant("settings", "titan_ckpt.resharding.placement_rules", "if not isinstance(value, list):", "if False:"),
    Plant("settings", _TUI + "metrics", "if type(v) in (int, float) and", "if"),
    Plant("incident", _READ + "reader", "if not 0 <= rank <= MAX_RANK:", "if False:"),
    Plant("incident", _READ + "flight_recorder", "if known and rank in known.members else ()", "if known else ()\n    assert not known or rank in known.members"),
)  # fmt: skip
