"""All flags of the runner, by group: what they are called, what they take, what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from absl import flags as absl_flags


class UsageError(Exception):
    """A command line that cannot be meant: unknown flag, impossible value, flags that exclude each other."""


@dataclass(frozen=True)
class Flag:
    """One flag. Numbers are read as text here and checked by the dataclass they end up in: each rule stands in one
    place."""

    name: str
    help: str
    kind: Literal["text", "texts", "switch"] = "text"  # "texts" may be repeated, a "switch" has a --no form


GROUPS: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag("config", "TOML file with any of the settings below; flags win over the file"),
        Flag(
            "model",
            "built-in name (smollm2, smollm2-moe), folder in Hugging Face format, .gguf file or hub id; default smollm2",
        ),
        Flag(
            "draft",
            "EAGLE-3 draft, likewise, or none; default: a built-in model's own (smollm2-eagle3 with smollm2), else none",
        ),
        Flag(
            "capture",
            "how the draft's config numbers layers: auto, input, output, or boundaries such as 3,31,59",
        ),
        Flag("draft_config", 'keys of the draft\'s config.json to replace, as JSON: {"rope_theta": 10000.0}'),
        Flag("dtype", "float32 (default) or bfloat16"),
        Flag("max_len", "tokens of prompt and answer together; default 2048"),
        Flag("slots", "requests decoded together; default 4"),
        Flag(
            "mesh",
            "devices to spread over: model=8 splits the weights, data=2,model=4 also the slots; default: one device",
        ),
        Flag("draft_placement", "on a mesh: replicated (default: a copy of the draft on each device) or sharded"),
        Flag("expert_split", "on a mesh: experts (whole ones on each device), width (a part of each), auto (default)"),
        Flag(
            "tuning",
            "what --speculation=auto decides by: auto (a stored tuning that fits, else costs measured at first use; default), "
            "measure, none, or a file",
        ),
        Flag(
            "check_wiring",
            "look, when a pair is loaded, whether another wiring of the draft is better; default: on",
            "switch",
        ),
    ),
    "check": (
        Flag("tokens", "tokens that the target writes, in all, to judge the draft by; default 512, 64 at least"),
        Flag("wiring", "measure every plausible wiring of the draft; default: on", "switch"),
        Flag("lossless", "compare speculative with plain decoding, and audit what differs; default: on", "switch"),
    ),
    "speculation": (
        Flag("speculation", "auto (default with a draft: chosen as it goes, docs/tune.md) or none (plain decoding)"),
        Flag("num_steps", "levels of the draft tree below its root; 0 is plain decoding"),
        Flag("topk", "children kept per level; 1 is a chain"),
        Flag(
            "num_draft_tokens",
            "nodes verified per cycle, root included; default: num_steps + 1, or up to 64 for a tree",
        ),
    ),
    "sampling": (
        Flag("max_new_tokens", "tokens to make at most; default 128"),
        Flag("temperature", "0 (default) takes the likeliest token"),
        Flag("top_k", "keep the k likeliest tokens; 0 keeps all"),
        Flag("top_p", "keep the likeliest tokens that make up this probability; 1 keeps all"),
        Flag("min_p", "keep tokens with at least this share of the likeliest one's probability; 0 keeps all"),
        Flag("seed", "makes a sampled answer repeatable; default: a fresh one per request, told in --json"),
        Flag("stop", "text that ends the answer, itself left out; may be repeated", "texts"),
        Flag("stop_token_ids", "token ids that end the answer, such as 0,2"),
        Flag("ignore_eos", "run on past the model's end-of-text tokens", "switch"),
    ),
    "prompts": (
        Flag("prompt", "a prompt; may be repeated", "texts"),
        Flag("prompt_file", "JSONL file; each line an object with one of prompt, token_ids, messages, turns"),
        Flag("token_ids", "a prompt as token ids, such as 1,2,3; may be repeated", "texts"),
        Flag("chat", "put text prompts into the model's chat template; off unless said", "switch"),
    ),
    "system": (Flag("system", "system message of the conversation"),),
    "output": (
        Flag("stream", "print the answer as it comes; default: on for a single prompt", "switch"),
        Flag("json", "one JSON object per answer on standard output", "switch"),
    ),
    "processes": (
        Flag("coordinator", "HOST:PORT of process 0, where several processes run the mesh together"),
        Flag("num_processes", "how many they are"),
        Flag("process_id", "number of this one, from 0; process 0 prints the answers"),
    ),
    "convert": (
        Flag("to", "orbax (read in slices, on any mesh) or safetensors (a Hugging Face folder); required"),
        Flag(
            "max_shard_gb",
            "10^9 bytes of a part at most: a group (default 2; what a killed run does again at most) or a file (default 5)",
        ),
        Flag(
            "quantize",
            "int8 or int4: quantise the layers' projections, in the form of compressed-tensors (needs qwix); default: no",
        ),
    ),
    "train data": (
        Flag("config", "TOML file with any of the settings below, without sections; flags win over the file"),
        Flag("out", "folder of the run: checkpoints, figures, the draft; a run that it holds is gone on with"),
        Flag("data", "JSONL files of conversations, answers or prompts, such as a.jsonl,b.jsonl"),
        Flag("model", "the target, as for generate; default smollm2"),
        Flag("held_out", "JSONL file of prompts to evaluate with; default: some of the data are set aside"),
        Flag("regenerate", "the target answers the prompts of the data first, and is trained on that", "switch"),
        Flag("temperature", "of those answers; default 0"),
        Flag("answer_tokens", "tokens of such an answer at most; default 256"),
    ),
    "train draft": (
        Flag("start", "draft, or folder of a run, to go on from; default: a fresh one of this shape:"),
        Flag("head", "own (default), or target: its rows are borrowed, not trained, and not in the draft's file"),
        Flag("mlp", "width of the draft's MLP; default: four times the target's width"),
        Flag("vocab", "draft vocabulary; default 32000, or the target's where that is smaller"),
        Flag("boundaries", "captured residual streams, such as 2,15,27; default 2, L//2, L-3"),
    ),
    "train step": (
        Flag("row_length", "tokens of a packed row; default 2048"),
        Flag("batch", "rows at a time; default 4"),
        Flag("accumulate", "batches of one optimiser step; default 1"),
        Flag("steps", "optimiser steps; default 1000"),
        Flag("rate", "peak learning rate; default 1e-4"),
        Flag("warmup", "share of the steps in which the rate rises, before its cosine; default 0.015"),
        Flag("unroll", "tokens drafted at every place; default 7"),
        Flag("decay", "weight of unrolled step j is decay^j; default 0.8"),
        Flag("clip", "global norm of the gradient at most; default 0.5"),
        Flag(
            "objective",
            "entropy (default: EAGLE's), acceptance (-log sum min(p, q)), or reached (that, by the chance of it)",
        ),
        Flag("optimiser", "adamw (default), or muon: matrices move along their momentum made orthogonal"),
        Flag("int8", "train towards the rounding of an int8 export", "switch"),
        Flag("dtype", "of target and compute: bfloat16 (default) or float32; weights are float32"),
        Flag(
            "mesh",
            "devices along each axis, such as model=8 or data=2,model=4: the target is split over model, rows over data",
        ),
    ),
    "train run": (
        Flag("seed", "of first weights, order and answers; default 0"),
        Flag("save_every", "steps between checkpoints; default 200"),
        Flag("keep", "checkpoints kept beside the best; default 2"),
        Flag("evaluate_every", "steps between evaluations by the engine; default 200"),
        Flag("evaluate_prompts", "held-out prompts; default 16"),
        Flag("evaluate_tokens", "tokens of each answer, 2 or more; default 128"),
        Flag("tree", "num_steps,topk,num_draft_tokens of the evaluation; default 7,1,8"),
        Flag("patience", "stop after so many evaluations without a new best; default 0: never"),
        Flag("slots", "prompts answered together; default 8"),
    ),
    "export": (
        Flag("to", "safeailab (also SpecForge, SGLang) or speculators (vLLM); required"),
        Flag(
            "model",
            "the draft's target, whose embedding and head are written where the draft borrows them; default: that of the run",
        ),
        Flag("int8", "projections in int8 with one factor per row (safeailab only)", "switch"),
        Flag("whole", "write a borrowed embedding and head too", "switch"),
        Flag("capture", "how the source numbers layers, where it does not say: input, output or boundaries"),
    ),
    "profile": (
        Flag(
            "prompts",
            "where no prompt is given: a built-in set or JSONL file to take them from; default mt_bench, one prompt, or --slots of them",
        ),
        Flag("repeats", "runs of each kind, untraced and traced in turns; default 3"),
        Flag("trace_dir", "folder to keep the raw trace in, for Perfetto and XProf; default: none is kept"),
        Flag(
            "twice",
            "also time parts of the cycle without a trace, each done twice inside the loop; compiles more",
            "switch",
        ),
        Flag("picture", "file for bars of the phases, such as profile.png or .svg (needs matplotlib)"),
        Flag("json", "everything as one JSON object on standard output", "switch"),
    ),
    "result": (Flag("json", "what was done, as one JSON object on standard output", "switch"),),
    "refusal": (Flag("traceback", "show where in the code an input was refused", "switch"),),
    "plan": (
        Flag("model", "built-in config (see configs/models), folder with a config.json, or such a file"),
        Flag("draft", "EAGLE-3 draft's config, likewise, or none; default: that of the built-in config"),
        Flag("draft_placement", "replicated (default): whole on every device, without collectives; or sharded"),
        Flag("expert_split", "experts (whole ones on each device), width (a part of each), auto (default)"),
        Flag("mesh", "devices along each axis, such as model=8 or data=2,model=4; default model=1"),
        Flag("tree", "num_steps,topk,num_draft_tokens; default 3,1,4; 0,1,1 is plain decoding"),
        Flag("slots", "requests decoded together; default 1"),
        Flag("max_len", "tokens of prompt and answer together; default 8192"),
        Flag("dtype", "compute dtype: bfloat16 (default) or float32"),
    ),
    "plan hardware": (
        Flag("hardware", "h200-nvlink (default), h100-nvlink, b200 or rtx-pro-6000-pcie"),
        Flag("bandwidth_gbs", "memory bandwidth of a device in 10^9 bytes/s, in place of the preset's"),
        Flag("tflops", "dense bfloat16 arithmetic of a device in 10^12 FLOP/s, likewise"),
        Flag("allreduce_us", "one small all-reduce inside a compiled loop, in microseconds, likewise"),
        Flag("device_memory_gb", "memory of a device in 10^9 bytes, likewise"),
        Flag("context", "tokens in the caches when a cycle is timed; default 1024"),
        Flag("tau", "tokens per cycle, bonus included, to tell tokens/s for; default 2,3"),
    ),
    "plan output": (
        Flag("json", "the plan as one JSON object", "switch"),
        Flag("compile", "compile the real program from shapes to check bytes and collectives; default: on", "switch"),
        Flag(
            "compile_for", "compile it for a GPU that need not be here: h200, or a file with XLA's description of one"
        ),
        Flag(
            "story", "retell, from the plan, how a team's 90 tokens/s became 71, and what would have fixed it", "switch"
        ),
    ),
    "tune": (
        Flag(
            "prompts",
            "prompt sets, one prompt of each in turn, such as mt_bench,gsm8k or a JSONL file; default: three built-in ones",
        ),
        Flag("max_new_tokens", "tokens of each answer of the calibration; default 64"),
        Flag("temperature", "of the second class of requests; default 0.8; 0 leaves it out"),
        Flag(
            "confirm",
            "settings of each class to run beside plain decoding; default 3: the best; more: others, spread over the ranking",
        ),
        Flag("out", "file to store the tuning in; default: the user's cache folder, where it is found again"),
        Flag("json", "the tuning as one JSON object on standard output", "switch"),
    ),
    "tune_kernels": (
        Flag("model", "whose shapes: built-in config (see configs/models), folder with a config.json, or such a file"),
        Flag(
            "draft", "whose shapes too: EAGLE-3 draft's config, likewise, or none; default: that of the built-in config"
        ),
        Flag("mesh", "devices along each axis: the shapes of one device's part; default model=1"),
        Flag("draft_placement", "replicated (default) or sharded, as in plan"),
        Flag("expert_split", "experts, width or auto (default), as in plan"),
        Flag("slots", "requests decoded together, such as 1,4; default 1"),
        Flag("max_len", "positions of the caches, such as 2048,8192; rounded up to powers of two; default 8192"),
        Flag("rows", "rows of a slot to measure with; one choice is made for all of them; default 1,4,8"),
        Flag("out", "file to store the choices in; default: the user's cache folder, where they are found again"),
        Flag("print", "show shapes, rules, number of candidates and what is stored; measure nothing", "switch"),
        Flag("json", "what was measured as one JSON object on standard output", "switch"),
    ),
    "bench": (
        Flag("prompts", "mt_bench (default), humaneval, gsm8k, qa, random, or JSONL files; several: mt_bench,gsm8k"),
        Flag("limit", "prompts of each set, spread evenly over it; default 8; 0: all"),
        Flag("chat", "ask text in the model's chat template; default: on", "switch"),
        Flag("num_steps", "levels of the trees, such as 1,3,5 (default); plain decoding is always measured"),
        Flag("topk", "children kept per level, such as 1,4; default 1: chains"),
        Flag("num_draft_tokens", "nodes of the trees, such as 8,16; a chain has num_steps + 1 whatever stands here"),
        Flag("tree", "num_steps,topk,num_draft_tokens, in place of the three above; may be repeated", "texts"),
        Flag("slots", "requests decoded together, such as 1,4; default 1"),
        Flag("temperature", "such as 0,0.8; default 0"),
        Flag("max_new_tokens", "of every answer at most; default 128"),
        Flag("top_k", "keep the k likeliest tokens; 0 keeps all"),
        Flag("top_p", "keep the likeliest tokens that make up this probability; 1 keeps all"),
        Flag("min_p", "keep tokens with at least this share of the likeliest one's probability; 0 keeps all"),
        Flag("seed", "of every request, and of random prompts and weights; default 0"),
        Flag("ignore_eos", "run on past the model's end-of-text tokens", "switch"),
        Flag("repeats", "timed turns of every cell; default 3"),
        Flag("phases", "time drafting and verification by themselves too; compiles two more programs a cell", "switch"),
        Flag("warm_up", "turns of a few tokens before them; default 1"),
        Flag(
            "simulate_acceptance",
            "accept at these rates, whatever the target says: one chance per level among the cycles that reach it, such as 0.8,0.7,0.6",
        ),
    ),
    "bench output": (
        Flag("json", "the result as one JSON object on standard output", "switch"),
        Flag("csv", "file to write a row per cell to"),
        Flag("plots", "folder to draw speed-up, acceptance and cost into (needs matplotlib: the extra plots)"),
    ),
    "run": (
        Flag("report", "print what was loaded, captured, borrowed and assumed", "switch"),
        Flag("traceback", "show where in the code an input was refused", "switch"),
    ),
}

# as in generate, but that these two read no tuning, and bench takes several slots
GROUPS["tune model"] = tuple(flag for flag in GROUPS["model"] if flag.name != "tuning")
GROUPS["bench model"] = tuple(flag for flag in GROUPS["tune model"] if flag.name != "slots")


def define(groups: Sequence[str]) -> absl_flags.FlagValues:
    """Flags of these groups, all unset. They are no globals: two command lines in one process do not meet."""
    values = absl_flags.FlagValues()
    values.set_gnu_getopt()
    for flag in (flag for group in groups for flag in GROUPS[group]):
        make = {
            "text": absl_flags.DEFINE_string,
            "texts": absl_flags.DEFINE_multi_string,
            "switch": absl_flags.DEFINE_boolean,
        }[flag.kind]
        make(flag.name, None, flag.help, flag_values=values)
    return values


def given(values: absl_flags.FlagValues, name: str) -> Any:
    """The flag's value, or None where it was not given, or given as "None" or nothing: scripts pass unset settings on
    like that."""
    value = values[name].value if name in values else None
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


def help_text(command: str, summary: str, groups: Sequence[str], places: Sequence[str] = ()) -> str:
    """What `eaglejax COMMAND --help` prints: one line per flag, by group. `places`: the names of what is given without a flag."""
    lines = [f"usage: eaglejax {' '.join((command, *places))} --flag=value ...", "", summary]
    for group in groups:
        lines += ["", f"{group}:"]
        for flag in GROUPS[group]:
            form = {"text": f"--{flag.name}=", "texts": f"--{flag.name}=", "switch": f"--[no]{flag.name}"}[flag.kind]
            lines.append(f"  {form:<22} {flag.help}")
    return "\n".join(lines)
