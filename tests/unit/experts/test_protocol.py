"""Headers of expert calls, and host records: what others send is checked field by field."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ExpertFailedError, HostBusyError, MalformedFrameError, RemoteFailureError
from swarm.experts.protocol import CallRequest, CallResponse, PartRequest, PartResponse, RequestIds, split_request_id

ID = bytes(range(16))
PART = PartRequest("ffn.0.1", ID, 2, apply=True, with_inputs=True)
REQUEST = CallRequest("backward", (PART, PartRequest("ffn.1.1", ID, 1)), False, 2.5, 1024.0, "bf16")
RESPONSE = CallResponse((PartResponse("ffn.0.1", ID, n=1, applied=True, weight_version=7),), 0.25, 0.5)

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_headers_survive_the_journey() -> None:
    assert CallRequest.from_meta(REQUEST.to_meta()) == REQUEST
    assert CallResponse.from_meta(RESPONSE.to_meta()) == RESPONSE


@given(name=st.sampled_from(sorted(REQUEST.to_meta())), value=junk)
def test_any_value_in_any_field_of_a_request_is_understood_or_refused(name: str, value: Any) -> None:
    with contextlib.suppress(MalformedFrameError):
        CallRequest.from_meta({**REQUEST.to_meta(), name: value})


@given(name=st.sampled_from(sorted(PART.to_meta())), value=junk)
def test_any_value_in_any_field_of_a_part_is_understood_or_refused(name: str, value: Any) -> None:
    with contextlib.suppress(MalformedFrameError):
        PartRequest.from_meta({**PART.to_meta(), name: value})


@given(name=st.sampled_from(sorted(RESPONSE.parts[0].to_meta())), value=junk)
def test_any_value_in_any_field_of_an_answer_is_understood_or_refused(name: str, value: Any) -> None:
    with contextlib.suppress(MalformedFrameError):
        PartResponse.from_meta({**RESPONSE.parts[0].to_meta(), name: value})


@pytest.mark.parametrize(
    "change",
    [
        {"v": True},
        {"pass": None},
        {"parts": None},
        {"parts": [7]},
        {"parts": [PART.to_meta()] * 4097},
        {"timeout_s": 0.0},
        {"timeout_s": float("inf")},
        {"timeout_s": "1"},
        {"grad_scale": -1.0},
        {"grad_scale": True},
        {"reply_codec": "x" * 33},
        {"train": 1},
    ],
)
def test_fields_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedFrameError):
        CallRequest.from_meta({**REQUEST.to_meta(), **change})


@pytest.mark.parametrize(
    "change", [{"n": -1}, {"n": 65}, {"n": True}, {"uid": "a/b"}, {"request_id": b""}, {"apply": 1}]
)
def test_fields_of_a_part_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedFrameError):
        PartRequest.from_meta({**PART.to_meta(), **change})


def test_tensors_are_dealt_out_in_order() -> None:
    assert REQUEST.split(["a", "b", "c"]) == [["a", "b"], ["c"]]
    for wrong in (["a", "b"], ["a", "b", "c", "d"]):
        with pytest.raises(MalformedFrameError):
            REQUEST.split(wrong)


def test_errors_of_parts_arrive_as_the_same_class() -> None:
    sent = PartResponse.failed(PART, HostBusyError("Full.", fix="Retry."), weight_version=3)
    back = PartResponse.from_meta(sent.to_meta())
    error = back.error("peer")
    assert isinstance(error, HostBusyError)
    assert (error.remote, back.weight_version, back.n) == ("peer", 3, 0)
    assert "Full. Fix: Retry." in str(error)
    assert len(PartResponse.failed(PART, ExpertFailedError("x" * 9999)).message) <= 400
    assert isinstance(PartResponse("a", ID, status=424242).error("p"), RemoteFailureError)
    assert PartResponse("a", ID).error("p") is None


def test_an_answer_must_be_to_the_request() -> None:
    answer = CallResponse((PartResponse("ffn.0.1", ID), PartResponse("ffn.1.1", ID)))
    answer.check_answers(REQUEST)
    for parts in (answer.parts[:1], answer.parts[::-1], (*answer.parts, answer.parts[0])):
        with pytest.raises(MalformedFrameError):
            CallResponse(parts).check_answers(REQUEST)


def test_request_ids_rise_and_differ_between_processes() -> None:
    one, other = RequestIds(), RequestIds()
    ids = [one.next() for _ in range(3)]
    assert [split_request_id(i)[1] for i in ids] == [1, 2, 3]
    assert len({split_request_id(i)[0] for i in ids}) == 1
    assert split_request_id(ids[0])[0] != split_request_id(other.next())[0]
    assert all(len(i) == 16 for i in ids)
