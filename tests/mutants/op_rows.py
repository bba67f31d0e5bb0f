"""Faults in the defining ops: one per term of their equations."""

from __future__ import annotations

from tests.mutants.mutant import Mutant


def _op(op: str, old: str, new: str, fault: str, tests: str = "") -> Mutant:
    return Mutant(f"spyglass/ops/{op}/reference.py", old, new, tests or f"tests/ops/test_{op}.py", f"{op}: {fault}")


def _hyper(op: str, old: str, new: str, fault: str) -> Mutant:
    return _op(op, old, new, fault, "tests/ops/test_hyper.py")


OP_ROWS: list[Mutant] = [
    _op("lora_delta", "a_RI.float().mT) * scale_R", "a_RI.float().mT)", "scale dropped"),
    _op("lora_delta", "slot_T[:, None] == slot_R", "slot_T[:, None] != 0", "every adapter for every row"),
    _op(
        "lora_delta", "torch.where(own_TR[:, None], u_TGR, 0.0)", "u_TGR * own_TR[:, None]", "0 · inf of another's row"
    ),
    _hyper("hyper_mix", "scale_3[0] + base_pre) + hc_eps", "scale_3[0] + base_pre)", "eps of pre dropped"),
    _hyper("hyper_mix", "2 * torch.sigmoid(post", "torch.sigmoid(post", "factor 2 of post dropped"),
    _hyper(
        "hyper_mix", "post * scale_3[1] + base_post)", "post * scale_3[1] + base_post) + hc_eps", "eps added to post"
    ),
    _hyper("hyper_mix", ".softmax(dim=-1) + hc_eps", ".softmax(dim=-1)", "eps behind the softmax dropped"),
    _hyper("hyper_mix", ".softmax(dim=-1) + hc_eps", ".softmax(dim=-2) + hc_eps", "softmax over sources"),
    _hyper(
        "hyper_mix", "dim=1, keepdim=True) + hc_eps)\n    for", "dim=2, keepdim=True) + hc_eps)\n    for", "rows first"
    ),
    _hyper(
        "hyper_mix", "dim=1, keepdim=True) + hc_eps)\n    for", "dim=1, keepdim=True))\n    for", "eps of a sum dropped"
    ),
    _hyper("hyper_mix", "range(rounds - 1)", "range(rounds)", "one round too many"),
    _hyper("hyper_mix", "keepdim=True) + norm_eps)", "keepdim=True))", "eps of the mean square dropped"),
    _hyper("hyper_mix", "comb * scale_3[2]", "comb * scale_3[1]", "wrong scale for comb"),
    _hyper("hyper_mix", "comb * scale_3[2] + base_comb", "comb * scale_3[2]", "base of comb dropped"),
    _hyper("hyper_expand", '"tml,tmc->tlc"', '"tlm,tmc->tlc"', "source and target swapped"),
    _hyper("hyper_expand", "post_TM[:, :, None] * z", "z", "post dropped"),
    _hyper("hyper_collapse", "pre_TM, streams_TMC.float()", "pre_TM * 0 + 1, streams_TMC.float()", "pre dropped"),
    _op(
        "rms_norm",
        "x.square().mean(dim=-1, keepdim=True) + eps)",
        "x.square().mean(dim=-1, keepdim=True))",
        "eps dropped",
    ),
    _op(
        "rms_norm",
        "x_ND.square().mean(dim=-1, keepdim=True) + eps",
        "x_ND.square().mean(dim=-1, keepdim=True)",
        "eps of the head norm dropped",
    ),
    _op("rms_norm", "if stepwise:", "if False:", "the head norm rounds once"),
    _op("rms_norm", "weight_D.float() * x", "x", "weight dropped"),
    _op("rms_norm", "torch.rsqrt(mean.float()).to(x_ND.dtype)", "torch.rsqrt(mean)", "the root rounds twice"),
    _op("fake_quant", '"e4m3": 1e-4', '"e4m3": 1e-12', "floor of amax lowered"),
    _op("fake_quant", '"e2m1": 6.0}', '"e2m1": 4.0}', "largest FP4 value wrong"),
    _op("fake_quant", "if tail_bf16:", "if False:", "rotary channels not rounded"),
    _op("fake_quant", "x_ND[..., :dims], x_ND[..., dims:]", "x_ND, x_ND[..., :0]", "all channels quantised"),
    _op("hadamard", "y * dim**-0.5", "y", "scale dropped"),
    _op("hadamard", "[a + b, a - b]", "[a + b, b - a]", "sign of the difference"),
    _op("rope_partial", "sin = -sin", "sin = sin", "the inverse turns forward"),
    _op("rope_partial", "a * cos - b * sin, a * sin + b * cos", "a * cos + b * sin, a * sin + b * cos", "a sign"),
    _op("rope_partial", "x_THD[..., -2 * pairs :]", "x_THD[..., : 2 * pairs]", "the first channels turn"),
    _op("compress_pool", 'gate_PBE.masked_fill(absent, float("-inf"))', "gate_PBE", "absent rows take weight"),
    _op("compress_pool", "kv_PBE.masked_fill(absent, 0.0)", "kv_PBE", "absent rows reach the sum"),
    _op("compress_pool", "softmax(dim=1)", "softmax(dim=2)", "softmax over channels"),
    _op(
        "compress_pool",
        "kv_PBE[:, :half, :dim], kv_PBE[:, half:, dim:]",
        "kv_PBE[:, :half, dim:], kv_PBE[:, half:, :dim]",
        "halves swapped",
    ),
    _op("compress_pool", "(-index - 2)", "(-index - 1)", "carried rows off by one"),
    _op("index_topk", "dots.relu()", "dots", "relu dropped"),
    _op("index_topk", "* weights_TN.float()[:, :, None]", "", "head weights dropped"),
    _op("index_topk", "ok = entry < visible_T", "ok = entry <= visible_T", "the open group is visible"),
    _op("index_topk", "q_TNI.dtype if stepwise", "torch.float32 if stepwise", "scores not rounded"),
    _op(
        "index_topk",
        "sort(dim=-1, descending=True, stable=True)",
        "flip(-1).sort(dim=-1, descending=True, stable=True)",
        "entries counted from the end",
    ),
    _op("index_topk", "torch.where(picks == none, -1, picks)", "picks", "no -1 for none"),
    _op("sparse_attention", "+ torch.exp(sink_H.float()[None, :, None] - top)", "", "sink dropped"),
    _op(
        "sparse_attention",
        "torch.exp(sink_H.float()[None, :, None] - top)",
        "torch.exp(sink_H.float()[None, :, None] * scale - top)",
        "sink scaled",
    ),
    _op("sparse_attention", "keys) * scale", "keys)", "scale dropped"),
    _op("sparse_attention", "p.to(q_THD.dtype).float(), keys", "p, keys", "p not rounded"),
    _op("sparse_attention", "p.sum(dim=-1", "p.to(q_THD.dtype).float().sum(dim=-1", "the sum of p rounded"),
    _op("sparse_attention", "position <= hi[part, None]", "position < hi[part, None]", "the last window row unseen"),
    _op(
        "sparse_attention",
        "(entry < visible[part, None])",
        "(entry <= visible[part, None])",
        "an open group is visible",
    ),
    _op("sparse_attention", "(entry >= 0) & ", "", "absent picks read row 0"),
    _op(
        "sparse_attention",
        "torch.where(ok[:, :, None], keys.float(), 0.0)",
        "keys.float()",
        "absent rows reach the product",
    ),
    _op("sparse_attention", "% table_SP.shape[1]", "% (table_SP.shape[1] + 1)", "ring of pages too long"),
    _op("router_topk", ".sqrt()", "", "square root dropped"),
    _op("router_topk", "scores_TE + bias_E", "scores_TE", "bias dropped"),
    _op("router_topk", "scores_TE + bias_picture_E", "ranked_TE + bias_picture_E", "bias_vl added to bias"),
    _op("router_topk", "scores_TE.gather(1, ids_TK)", "ranked_TE.gather(1, ids_TK)", "biased weights"),
    _op(
        "router_topk",
        "weights_TK.sum(dim=-1, keepdim=True) * scale",
        "weights_TK.sum(dim=-1, keepdim=True)",
        "scale dropped",
    ),
    _op(
        "router_topk",
        "torch.where(picture_T[:, None], ids_TK, forced_TK)",
        "forced_TK",
        "pictures take the table's experts",
    ),
    _op(
        "router_topk",
        "x_TC.float() @ weight_EC.float().mT",
        "(x_TC.bfloat16() @ weight_EC.bfloat16().mT).float()",
        "scores in bf16",
    ),
    _op("experts_grouped", ".clamp(max=limit)", "", "gate not clamped"),
    _op("experts_grouped", ".clamp(max=limit)", ".clamp(-limit, limit)", "gate clamped below"),
    _op("experts_grouped", ".clamp(-limit, limit)", ".clamp(max=limit)", "up not clamped below"),
    _op(
        "experts_grouped",
        "silu(gate) * up * weights_TK[token, choice, None]",
        "silu(gate) * up",
        "routing weight dropped",
    ),
    _op(
        "experts_grouped",
        "out_TC.index_add(0, token, y.float())",
        "out_TC.index_add(0, token, y.float()).to(x_TC.dtype).float()",
        "the sum is rounded",
    ),
    _op(
        "experts_grouped",
        'y = product("w2", w2, z.to(x_TC.dtype), expert)',
        "y = linear_block(z.to(x_TC.dtype), w2[expert])",
        "activation not rounded",
    ),
    _op(
        "experts_grouped",
        ' * weights_TK[token, choice, None]\n        y = product("w2", w2, z.to(x_TC.dtype), expert)',
        '\n        y = product("w2", w2, z.to(x_TC.dtype), expert) * weights_TK[token, choice, None]',
        "routing weight applied behind w2",
    ),
    _op(
        "linear_block",
        "x_TI if rounding is None else fake_quant(x_TI, rounding)",
        "x_TI",
        "input not rounded",
        "tests/ops/test_linear.py",
    ),
    _op("linear_block", "out = out + bias_O.float()", "out = out", "bias dropped", "tests/ops/test_linear.py"),
    _op(
        "linear_block",
        "out = out + addend_TO",
        "out = out.to(x_TI.dtype) + addend_TO",
        "the addend comes behind a rounding",
        "tests/ops/test_linear.py",
    ),
    _op("linear_grouped", "out_TGO = out_TGO + addend_TGO", "pass", "addend dropped", "tests/ops/test_linear.py"),
    _op("cache_write", "write_T >= 0", "write_T >= -1", "padding is written"),
    Mutant(
        "spyglass/ops/native.py",
        "(127 - 117, 127 + 119)",
        "(127 - 118, 127 + 120)",
        "tests/unit/layers",
        "a scale that the pair products cannot hold is taken",
    ),
    Mutant(
        "spyglass/layers/build.py",
        'self.ops.chosen["linear_block"] == "cpu" and',
        "False and",
        "tests/unit/layers",
        "weights are not shown to the kernels first",
    ),
    Mutant(
        "spyglass/ops/hyper_mix/reference.py",
        "* scale_3[0] + base_pre",
        "* scale_3[0]",
        "tests/ops/test_hyper.py",
        "hyper_mix: base of pre dropped",
    ),
    Mutant(
        "spyglass/ops/hyper_mix/reference.py",
        "pre * scale_3[0]",
        "pre",
        "tests/ops/test_hyper.py",
        "hyper_mix: scale of pre dropped",
    ),
    Mutant(
        "spyglass/ops/hyper_mix/reference.py",
        "post * scale_3[1]",
        "post",
        "tests/ops/test_hyper.py",
        "hyper_mix: scale of post dropped",
    ),
    Mutant(
        "spyglass/ops/hyper_mix/reference.py",
        "* scale_3[1] + base_post",
        "* scale_3[1]",
        "tests/ops/test_hyper.py",
        "hyper_mix: base of post dropped",
    ),
    Mutant(
        "spyglass/ops/hyper_mix/reference.py",
        "product_TJ * torch.rsqrt(x_TE.square().mean(dim=-1, keepdim=True) + norm_eps)",
        "product_TJ",
        "tests/ops/test_hyper.py",
        "hyper_mix: norm of the streams dropped",
    ),
    Mutant(
        "spyglass/ops/hyper_mix/reference.py",
        "        comb_TMM = comb_TMM / (comb_TMM.sum(dim=2, keepdim=True) + hc_eps)\n",
        "",
        "tests/ops/test_hyper.py",
        "hyper_mix: rows are not normalised",
    ),
    Mutant(
        "spyglass/ops/hyper_mix/reference.py",
        "dim=2, keepdim=True) + hc_eps",
        "dim=2, keepdim=True)",
        "tests/ops/test_hyper.py",
        "hyper_mix: eps of a row's sum dropped",
    ),
    Mutant(
        "spyglass/ops/hyper_expand/reference.py",
        " + mixed)",
        ")",
        "tests/ops/test_hyper.py",
        "hyper_expand: streams forgotten",
    ),
    Mutant(
        "spyglass/ops/router_topk/reference.py",
        "/ weights_TK.sum(dim=-1, keepdim=True)",
        "",
        "tests/ops/test_router_topk.py",
        "router_topk: weights do not sum to one",
    ),
    Mutant(
        "spyglass/ops/router_topk/reference.py",
        "softplus(x_TC",
        "relu(x_TC",
        "tests/ops/test_router_topk.py",
        "router_topk: no softplus",
    ),
    Mutant(
        "spyglass/ops/sparse_attention/reference.py",
        "p.to(q_THD.dtype).float(), keys) / total",
        "p.to(q_THD.dtype).float(), keys)",
        "tests/ops/test_sparse_attention.py",
        "sparse_attention: not divided by the sum",
    ),
    Mutant(
        "spyglass/ops/sparse_attention/reference.py",
        ".clamp(min=-1e30)\n    p = ",
        "\n    p = ",
        "tests/ops/test_sparse_attention.py",
        "sparse_attention: a row without keys is NaN",
    ),
]
