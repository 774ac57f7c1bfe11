"""Policy: roles, texts, aliases and op rules (docs/spec.md, section 2)."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import OP_RULES, OpClass, Policy, PolicyError
from polyamp.policy import ALIASES

ROLE_FORMATS = ("float32", "float16", "bfloat16")

roles = st.sampled_from(ROLE_FORMATS)
rules = st.dictionaries(st.sampled_from([*OP_RULES, *OpClass]), st.sampled_from(list(OpClass)), max_size=5)
islands = st.lists(st.text("abzAZ09_./-*?[]!é", min_size=1, max_size=8), max_size=4)


@given(roles, roles, roles, roles, rules, islands)
def test_a_policy_equals_what_its_text_parses_to(
    param: str, compute: str, output: str, reduce: str, ops: dict[str, OpClass], names: list[str]
) -> None:
    policy = Policy(param, compute, output, reduce, ops=ops, islands=names)
    parsed = Policy(str(policy))
    assert parsed == policy
    assert hash(parsed) == hash(policy)
    assert (parsed.param_dtype, parsed.compute_dtype, parsed.output_dtype, parsed.reduce_dtype) == (param, compute, output, reduce)
    assert dict(parsed.ops) == ops
    assert set(parsed.islands) == set(names)
    assert eval(repr(policy), {"Policy": Policy}) == policy


@pytest.mark.parametrize(
    ("alias", "roles"),
    [
        *((word, ("float32", "float16", "float32")) for word in ("mixed_float16", "16-mixed", "fp16", "amp_fp16")),
        *((word, ("float32", "bfloat16", "float32")) for word in ("mixed_bfloat16", "bf16-mixed", "bf16", "amp_bf16")),
        *((word, ("float32",) * 3) for word in ("float32", "32-true", "fp32", "f32", "no")),
        *((word, ("float16",) * 3) for word in ("float16", "16-true", "f16")),
        *((word, ("bfloat16",) * 3) for word in ("bfloat16", "bf16-true")),
    ],
)
def test_aliases(alias: str, roles: tuple[str, str, str]) -> None:
    policy = Policy(alias)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == roles
    assert policy.reduce_dtype == "float32"


def test_the_aliases_above_are_all_there_are() -> None:
    assert len(ALIASES) == 18


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("mixed_float16", "params=float32,compute=float16,output=float32,reduce=float32"),
        ("p=f32,c=bf16", "params=float32,compute=bfloat16,output=bfloat16,reduce=float32"),
        ("c=f16", "params=float32,compute=float16,output=float16,reduce=float32"),
        ("p=f16", "params=float16,compute=float16,output=float16,reduce=float32"),
        ("params=float32, compute=float16 ,output=float32", "params=float32,compute=float16,output=float32,reduce=float32"),
        ("compute_dtype=fp16,param_dtype=f32,r=f16", "params=float32,compute=float16,output=float16,reduce=float16"),
        ("c=f16,ops=softmax:compute;add:float32", "params=float32,compute=float16,output=float16,reduce=float32,ops=add:float32;softmax:compute"),
        ("c=f16,islands=head;*.norm*", "params=float32,compute=float16,output=float16,reduce=float32,islands=*.norm*;head"),
    ],
)
def test_texts(text: str, canonical: str) -> None:
    assert str(Policy(text)) == canonical


def test_defaults_of_roles() -> None:
    assert str(Policy()) == "params=float32,compute=float32,output=float32,reduce=float32"
    assert str(Policy("float32", "float16")) == "params=float32,compute=float16,output=float16,reduce=float32"
    assert str(Policy(compute_dtype="bf16")) == "params=float32,compute=bfloat16,output=bfloat16,reduce=float32"


def test_a_dtype_word_beside_other_roles_is_a_dtype_not_an_alias() -> None:
    assert Policy("bf16").param_dtype == "float32"
    assert Policy("bf16", "bf16").param_dtype == "bfloat16"


def test_arguments_override_a_text_and_a_policy() -> None:
    base = Policy("mixed_float16", ops={"softmax": "compute"}, islands="head")
    changed = Policy(base, output_dtype="float16", ops={"exp": "pass"}, islands=["tail"])
    assert (changed.compute_dtype, changed.output_dtype) == ("float16", "float16")
    assert dict(changed.ops) == {"softmax": "compute", "exp": "pass"}
    assert changed.islands == ("head", "tail")
    assert Policy(base) == base
    assert Policy("p=f32,c=f16", reduce_dtype="f16").reduce_dtype == "float16"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mixed_float61", ["mixed_float61", *ALIASES]),
        ("", list(ALIASES)),
        ("half", ["half", "float16", "bfloat16", "device"]),
        ("p=f32,z=f16", ["z=f16", "params", "compute", "output", "reduce", "islands", "ops"]),
        ("p=f32,c", ["'c'", "key=value"]),
        ("p=f32,c=", ["'c='", "key=value"]),
        ("p=f32,", ["key=value"]),
        ("p=f32,c=f17", ["f17", "float16", "bfloat16"]),
        ("p=f32,params=f32", ["param_dtype", "twice"]),
        ("c=e4m3", ["compute_dtype=float8_e4m3fn", "float32, float16, bfloat16"]),
        ("c=f16,ops=softmax", ["softmax", "compute, float32, promote, pass"]),
        ("c=f16,ops=softmax:half", ["half", "compute, float32, promote, pass"]),
        ("c=f16,ops=sofmax:compute", ["sofmax", "softmax", "matmul"]),
        ("c=f16,islands=a b", ["a b", "pattern"]),
    ],
)
def test_an_error_shows_what_was_given_and_what_is_valid(text: str, words: list[str]) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(text)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_comma_in_an_island_is_an_error_because_the_text_could_not_hold_it() -> None:
    with pytest.raises(PolicyError, match="a,b"):
        Policy("mixed_float16", islands=["a,b"])


def test_a_policy_is_immutable_and_copies_as_itself() -> None:
    policy = Policy("mixed_float16", ops={"softmax": "compute"}, islands=["head"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute_dtype = "float32"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    assert dataclasses.replace(policy, compute_dtype="bfloat16") == Policy(policy, "bfloat16")


def test_order_of_rules_and_islands_does_not_matter() -> None:
    a = Policy("bf16", ops={"exp": "pass", "add": "compute"}, islands=["x", "y", "x"])
    b = Policy("bf16", ops=[("add", OpClass.COMPUTE), ("exp", OpClass.PASS)], islands=["y", "x"])
    assert a == b
    assert hash(a) == hash(b)


@pytest.mark.parametrize(
    ("text", "mixed", "scaled"),
    [("mixed_float16", True, True), ("mixed_bfloat16", True, False), ("float16", False, True), ("float32", False, False), ("bfloat16", False, False)],
)
def test_what_a_policy_needs(text: str, mixed: bool, scaled: bool) -> None:
    assert (Policy(text).is_mixed, Policy(text).needs_loss_scale) == (mixed, scaled)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        *((op, "compute") for op in ("matmul", "einsum", "linear", "conv2d", "conv_transpose", "attention", "lstm_cell")),
        *((op, "float32") for op in ("exp", "log", "pow", "softmax", "log_softmax", "logsumexp", "sum", "mean", "var", "prod", "cumsum", "norm")),
        *((op, "float32") for op in ("layer_norm", "group_norm", "rms_norm", "batch_norm_statistics", "cross_entropy", "mse_loss", "ctc_loss")),
        *((op, "promote") for op in ("add", "mul", "cat", "where", "dot")),
        *((op, "pass") for op in ("relu", "reshape", "embedding", "an_op_of_tomorrow")),
    ],
)
def test_op_table(op: str, expected: str) -> None:
    assert Policy("mixed_float16").op_class(op) == expected


def test_an_op_override_beats_a_class_override_beats_the_table() -> None:
    policy = Policy("mixed_float16", ops={"float32": "compute", "exp": "float32", "pass": "float32"})
    assert policy.op_class("softmax") is OpClass.COMPUTE
    assert policy.op_class("exp") is OpClass.FLOAT32
    assert policy.op_class("matmul") is OpClass.COMPUTE
    assert policy.op_class("add") is OpClass.PROMOTE
    assert policy.op_class("an_op_of_tomorrow") is OpClass.FLOAT32


def test_no_op_stands_in_two_classes() -> None:
    from polyamp.op_rules import _TABLE

    named = [op for names in _TABLE.values() for op in names.split()]
    assert sorted(named) == sorted(OP_RULES)


def test_islands_are_case_sensitive_shell_patterns_of_the_whole_name() -> None:
    policy = Policy("mixed_float16", islands=["encoder.norm*", "block/head"])
    assert policy.is_island("encoder.norm1")
    assert policy.is_island("block/head")
    assert not policy.is_island("decoder.encoder.norm1")
    assert not policy.is_island("Encoder.norm1")
    assert not policy.is_island("block/head/weight")
    assert not Policy("mixed_float16").is_island("anything")
