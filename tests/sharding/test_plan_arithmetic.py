"""The bytes of two real plans against arithmetic written out by hand, from the released sizes and nothing of the code under test.

One device of eight. bfloat16 is 2 bytes, float32 4.
"""

from dataclasses import replace

from plan_cases import plan_of

from eaglejax.sharding.aot import Compiled
from eaglejax.sharding.memory import Rows, program_rows, temporary_bytes


def test_kimi_k25_on_eight_devices():
    plan = plan_of("kimi-k2.5")
    # latent attention: q_a 1536 x 7168 and kv_a 576 x 7168 whole on each device, 64 / 8 = 8 heads of the rest
    attention = 1536 * 7168 + 8 * 192 * 1536 + 576 * 7168 + 8 * (128 + 128) * 512 + 7168 * 8 * 128
    expert = 3 * 7168 * 2048  # gate, up, down
    assert plan.target_weights == {
        "attention": 61 * attention * 2,
        "dense MLP": 3 * 7168 * (18432 // 8) * 2,  # layer 0
        # 60 layers of 384 / 8 = 48 experts; a group of 32 weights takes 16 bytes and a bfloat16 scale
        "experts": 60 * 48 * (expert // 32) * (16 + 2),
        "shared experts": 60 * 3 * 7168 * (2048 // 8) * 2,
        "router": 60 * 384 * (7168 + 1) * 4,  # float32, with its correction bias, whole
        "norms": (61 * (2 * 7168 + 1536 + 512) + 7168) * 2,
        "embedding": (163840 // 8) * 7168 * 2,
        "head": (163840 // 8) * 7168 * 2,
    }
    assert sum(plan.target_weights.values()) == 76_512_894_976
    # the head: 64 heads of 128 over 64, 18432 wide, reads three states of 7168; its embedding is the target's
    assert plan.draft_weights == {
        "attention": (3 * 8 * 128 * 2 * 7168 + 7168 * 8 * 128) * 2,
        "dense MLP": 3 * 7168 * (18432 // 8) * 2,
        "norms": 4 * 7168 * 2,
        "fc": 7168 * (3 * 7168 // 8) * 2,
        "head": (32000 // 8) * 7168 * 2,
        "target ids": 32000 * 4,
    }
    assert plan.state["target cache"] == 61 * (512 + 64) * 8192 * 2
    assert plan.state["draft cache"] == 2 * 8 * 128 * 8192 * 2
    assert plan.state["pending features"] == 4 * (3 * 7168 * 2 + 4)


def test_kimi_k25_with_a_replicated_draft():
    plan = plan_of("kimi-k2.5", placement="replicated")
    assert plan.draft_weights["attention"] == (3 * 64 * 128 * 2 * 7168 + 7168 * 64 * 128) * 2
    assert plan.borrowed_copies == plan.draft_weights["embedding"] == 163840 * 7168 * 2 == 2_348_810_240
    assert plan.state["draft cache"] == 2 * 64 * 128 * 8192 * 2


def test_deepseek_v3_on_eight_devices():
    plan = plan_of("deepseek-v3")
    tile = lambda rows, columns: rows * columns + (rows // 128) * (columns // 128) * 4
    attention = (
        tile(1536, 7168)
        + tile(16 * 192, 1536)  # 128 / 8 = 16 heads
        + 576 * 7168 + (576 // 64) * (7168 // 128) * 4  # 576 = 4.5 x 128: scales every 64 rows
        + 2 * 16 * tile(128, 512)
        + tile(7168, 16 * 128)
    )  # fmt: skip
    mlp = lambda width: 2 * tile(width, 7168) + tile(7168, width)
    assert plan.target_weights == {
        "attention": 61 * attention,
        "dense MLP": 3 * mlp(18432 // 8),
        "experts": 58 * 32 * mlp(2048),
        "shared experts": 58 * mlp(2048 // 8),
        "router": 58 * 256 * (7168 + 1) * 4,
        "norms": (61 * (2 * 7168 + 1536 + 512) + 7168) * 2,
        "embedding": (129280 // 8) * 7168 * 2,
        "head": (129280 // 8) * 7168 * 2,
    }
    assert plan.state["target cache"] == 61 * 576 * 8192 * 2
    # the head: 56 query heads over 8 KV heads of 128, 40960 wide
    assert plan.draft_weights["attention"] == ((7 + 2 * 1) * 128 * 2 * 7168 + 7168 * 7 * 128) * 2
    assert plan.draft_weights["dense MLP"] == 3 * 7168 * (40960 // 8) * 2


def test_qwen3_235b_shares_its_four_kv_heads_among_eight_devices():
    plan = plan_of("qwen3-235b-a22b")
    # 64 / 8 = 8 query heads and one KV head of 128, each of the 4 kept twice
    assert plan.target_weights["attention"] == 94 * ((8 + 2) * 128 * 4096 + 4096 * 8 * 128) * 2
    assert plan.target_weights["experts"] == 94 * 16 * 3 * 4096 * 1536 * 2
    assert plan.state["target cache"] == 94 * 2 * 1 * 128 * 8192 * 2
    assert any("KV head" in note for note in plan.notes)


def test_collectives_of_a_cycle():
    plan = plan_of("kimi-k2.5")
    counted = lambda phases: [(p.name, sum(c.count for c in p.collectives if c.kind == "all-reduce")) for p in phases]
    # two a layer and one for the embedding; the choice of a token is one small gather
    assert counted(plan.plain) == [("target", 2 * 61 + 1), ("head", 0)]
    assert plan.plain[1].collectives[0].bytes == 8 * 2 * 4
    assert counted(plan.cycle) == [
        ("draft extend", 4),  # embedding, fc, attention, MLP
        ("draft head, level 1", 0),
        ("draft steps (2)", 2 * 3),
        ("draft heads, levels 2 to 3", 0),
        ("verify (4 rows)", 123),
        ("head", 0),
    ]
    verify = plan.cycle[4].collectives
    assert {c.bytes for c in verify} == {4 * 7168 * 2}
    replicated = plan_of("kimi-k2.5", placement="replicated").cycle
    assert [p.collective_count for p in replicated[:4]] == [0, 0, 0, 0]


def test_bytes_and_flops_of_a_plain_step():
    """Of one row on the busiest of eight devices: 2.575 of its 48 experts a layer, everything else once."""
    plan = plan_of("kimi-k2.5")
    once = sum(size for name, size in plan.target_weights.items() if name not in ("experts", "embedding", "head"))
    experts = 2.574975 / 48 * plan.target_weights["experts"]
    cache = 61 * 576 * 1024 * 2
    final_norm = 7168 * 2  # counted with the head
    expected = once + experts + cache + 7168 * 2 - final_norm
    assert abs(plan.plain[0].bytes - expected) < 1e-5 * expected
    assert plan.plain[1].bytes == plan.target_weights["head"] + final_norm
    assert plan.plain[1].flops == 2 * (163840 // 8) * 7168 + 2 * 7168


def test_temporaries_of_a_cycle():
    """The formula of sharding/memory.py with numbers in it, for 4 rows of Kimi-K2.5. Compiled for an H200 with 3 layers, XLA's decode
    program has 139,800,248 bytes of temporaries, of which 134,217,728 are the draft's cache with unused rows cleared."""
    plan = plan_of("kimi-k2.5", placement="replicated")
    sizes = plan.sizes()
    parts = temporary_bytes(sizes, program_rows(sizes)["decode"], 0)
    own, captured = 4 * 61 * 576 * 2, 2 * 4 * 3 * 7168 * 2
    assert parts["rows and captures until the commit"] == own + captured
    assert parts["residual stream"] == 3 * 4 * 7168 * 2
    # the draft's 64 heads: queries, the cleared values, the weights of 8196 keys, 8 parts of the result
    queries, cleared, weights = 2 * 4 * 64 * 128 * 2, 8192 * 64 * 128 * 2, 4 * 64 * 8196 * 2
    assert parts["largest step (draft attention)"] == queries + cleared + weights + 8 * 4 * 64 * 128 * 4
    of_three_layers = plan.decode_temporaries - 58 * 4 * 576 * 2
    assert abs(of_three_layers / 139_800_248 - 1) < 0.01


def test_prefill_needs_more():
    plan = plan_of("kimi-k2.5", max_len=65536)
    assert plan.hungrier == "prefill"
    rows, keys = 256, 65536 + 256
    scores, weights = rows * 8 * keys * 4, rows * 8 * keys * 2
    assert plan.temporaries["largest step (attention)"] == 2 * rows * 8 * 576 * 2 + scores + weights


def test_few_rows_read_the_weights_of_their_experts_in_place():
    """Qwen3-30B-A3B on one device, 4 rows: 32 (row, expert) pairs of 128 experts; what is left is attention. Compiled for an H200 with 3
    layers, XLA's decode program has 12,735,296 bytes of temporaries."""
    plan = plan_of("qwen3-30b-a3b", devices=1, placement="replicated")
    sizes = plan.sizes()
    rows = program_rows(sizes)
    cleared, weights, parts = 8192 * 4 * 128 * 2, 4 * 32 * 8196 * 2, 32 * 4 * 32 * 128 * 4
    found = temporary_bytes(sizes, rows["decode"], 0)
    assert found["largest step (attention)"] == 2 * 4 * 32 * 128 * 2 + cleared + weights + parts
    of_three_layers = plan.decode_temporaries - 45 * 4 * 2 * 512 * 2
    assert abs(of_three_layers / 12_735_296 - 1) < 0.01
    # one expert's weights at a time on a CPU, and where there are more pairs than half of the experts
    expert = 2 * 768 * 2048 * 2
    small = replace(sizes, max_len=64)
    for other in (
        temporary_bytes(replace(small, platform="cpu"), rows["decode"], 0),
        temporary_bytes(small, replace(rows["decode"], run=9), 0),
    ):
        largest = max(size for name, size in other.items() if name.startswith("largest"))
        assert expert < largest < 2 * expert


def test_a_weight_dequantised_whole():
    """DeepSeek-V3 in FP8 on 8 devices: gate and up of the dense layers, [2, 2304, 7168] a device. Compiled for an H200 with 4 layers, XLA's
    decode program has 66,928,368 bytes of temporaries, 69,435,120 for a tree of 16."""
    for tree, compiled in (((3, 1, 4), 66_928_368), ((4, 4, 16), 69_435_120)):
        plan = plan_of("deepseek-v3", placement="replicated", tree=tree)
        parts = temporary_bytes(plan.sizes(), program_rows(plan.sizes())["decode"], plan._dequantised)
        assert parts["largest step (a weight dequantised)"] == 2 * 2304 * 7168 * 2
        of_four_layers = plan.decode_temporaries - 57 * tree[2] * 576 * 2
        assert abs(of_four_layers / compiled - 1) < 0.02


def test_several_slots_keep_the_caches_twice():
    """Qwen3-30B-A3B, 4 slots: compiled for an H200 with 3 layers, 268,889,408 bytes, of which 268,435,456 are the caches again."""
    caches = lambda name, slots: temporary_bytes(
        replace(plan_of(name, devices=1, placement="replicated").sizes(), slots=slots), Rows(4 * slots, 0, 0, 4), 0
    )["caches in the compiler's layout"]
    assert caches("qwen3-30b-a3b", 1) == 0
    assert caches("qwen3-30b-a3b", 4) == 4 * 8192 * (48 + 1) * 2 * 4 * 128 * 2 == 268_435_456 // 4 * 49
    # latent attention has one head; the draft's 64 count
    assert caches("kimi-k2.5", 4) == 4 * 8192 * 2 * 64 * 128 * 2


def test_the_estimate_stands_beside_a_gpu_s_figure():
    plan = plan_of("qwen3-30b-a3b", devices=2, placement="replicated")
    compiled = lambda platform: Compiled(platform, f"this {platform}", 0, 0, 13_000_000, [], [], 1.0)
    line = f"for this gpu: 13,000,000 bytes; our estimate for this program: {plan.decode_temporaries:,} ("
    assert line in compiled("gpu").to_text(plan)
    assert compiled("gpu").to_json(plan)["temporary_bytes_by_our_estimate"] == plan.decode_temporaries
    assert "not a GPU's figure" in compiled("cpu").to_text(plan)
    assert compiled("cpu").to_json(plan)["temporary_bytes_by_our_estimate"] is None
