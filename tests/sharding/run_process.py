"""One of the processes of `test_processes.py`: joins the run, does what it is told, prints one JSON line."""

import json
import sys
import threading

import jax

jax.config.update("jax_num_cpu_devices", 4)

from eaglejax.sharding.processes import connect  # noqa: E402

port, process, job, target, draft = sys.argv[1:6]
connect(f"localhost:{port}", 2, int(process))

from eaglejax import EagleJaxEngine, Sampling, Speculation  # noqa: E402
from eaglejax.errors import EagleJaxError  # noqa: E402

TREE = Speculation(3, 2, 8)
PROMPTS = [[5, 9, 20, 3], [7], [40, 41]]


def load(**more):
    settings = {"mesh": "data=2,model=4", "max_len": 64} | more
    return EagleJaxEngine.from_pretrained(target, draft=draft, speculation=TREE, slots=4, **settings)


def same_text() -> dict:
    out = {}
    for mesh in ("data=2,model=4", "model=8"):
        engine = load(mesh=mesh)
        greedy = engine.generate(PROMPTS, Sampling(max_new_tokens=16))
        fresh = engine.generate(PROMPTS[:1], Sampling(max_new_tokens=8, temperature=1.0))[0]
        streamed = [t for chunk in engine.stream(PROMPTS[0], Sampling(max_new_tokens=16)) for t in chunk.token_ids]
        score = engine.score(PROMPTS[0])
        out[mesh] = {
            "greedy": [answer.token_ids for answer in greedy],
            "accepted": [answer.stats.accepted_per_cycle for answer in greedy],
            "sampled": [fresh.token_ids, fresh.stats.seed],
            "streamed": streamed,
            "logit": float(score.logits[0, 0]),
            "tree": [int(t) for t in engine.propose(PROMPTS[0]).tokens],
        }
    return out


def different_prompts() -> dict:
    load().generate([[5, 9 + int(process)]], Sampling(max_new_tokens=4))
    return {}


def different_settings() -> dict:
    load(max_len=64 + int(process))
    return {}


def one_stays_away() -> dict:
    engine = load()
    if process == "1":
        threading.Event().wait(8)  # alive, and somewhere else
        return {}
    engine.generate(PROMPTS, Sampling(max_new_tokens=4))
    return {}


def short_of_memory() -> dict:
    """Process 1 has too little memory for its part: both refuse."""
    from eaglejax.sharding import fit

    if process == "1":
        fit.machine_free = lambda: 1000
    load()
    return {}


def a_bad_prompt_in_one() -> dict:
    load().generate([[5, 9] if process == "0" else [5, 9999]], Sampling(max_new_tokens=4))
    return {}


def a_seed_in_one() -> dict:
    load().generate([[5, 9]], Sampling(max_new_tokens=4, temperature=1.0, seed=3 if process == "0" else None))
    return {}


def a_stream_left_in_one() -> dict:
    engine = load()
    for number, _ in enumerate(engine.stream(PROMPTS[0], Sampling(max_new_tokens=32))):
        if process == "1" and number == 1:
            break
    engine.generate(PROMPTS, Sampling(max_new_tokens=4))
    return {}


def a_bad_draft_in_one() -> dict:
    load(draft_config={"rope_theta": 1e4} if process == "0" else None)
    return {}


def no_mesh() -> dict:
    load(mesh=None)
    return {}


def part_of_the_devices() -> dict:
    load(mesh="model=4")
    return {}


try:
    print("RESULT " + json.dumps(globals()[job]()), flush=True)
except EagleJaxError as error:
    print("RESULT " + json.dumps({"refused": str(error)}), flush=True)
