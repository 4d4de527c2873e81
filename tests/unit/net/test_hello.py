"""The hello state machines, message by message, without a network."""

from __future__ import annotations

import pytest

from swarm.errors import (
    AdmissionRefusedError,
    BadSignatureError,
    IdentityMismatchError,
    MalformedFrameError,
    ProtocolVersionError,
    WrongRunError,
)
from swarm.identity import KeyPair
from swarm.net.hello import MAX_ADDRESSES, DialerHello, ListenerHello
from swarm.net.security import OpenAuthorizer
from swarm.pb import hello_pb2 as pb
from swarm.roles import Role

RUN = b"r" * 32
CERTIFICATE = b"c" * 32
TOKEN = b"t" * 32


def sides(
    dialer_run: bytes = RUN, dialer_certificate: bytes = CERTIFICATE, addresses: tuple[str, ...] = ("10.0.0.1:1",)
) -> tuple[KeyPair, DialerHello, KeyPair, ListenerHello]:
    ann, bob = KeyPair.generate(), KeyPair.generate()
    dialer = DialerHello(ann, OpenAuthorizer(dialer_run, [Role.TRAINER]), bob.peer_id, dialer_certificate)
    listener = ListenerHello(bob, OpenAuthorizer(RUN, [Role.HOST]), CERTIFICATE, addresses)
    return ann, dialer, bob, listener


def test_both_sides_meet() -> None:
    ann, dialer, bob, listener = sides()
    met = listener.accept(dialer.answer(listener.challenge(dialer.opening())))
    welcomed = dialer.finish(listener.welcome(TOKEN, 60.0))
    assert (met.peer_id, met.admission.roles) == (ann.peer_id, {Role.TRAINER})
    assert (welcomed.met.peer_id, welcomed.met.admission.roles) == (bob.peer_id, {Role.HOST})
    assert (welcomed.token, welcomed.idle_s, welcomed.addresses) == (TOKEN, 60.0, ("10.0.0.1:1",))


def test_each_hello_signs_fresh_nonces() -> None:
    _, dialer, _, listener = sides()
    first = dialer.opening()
    proof = dialer.answer(listener.challenge(first))
    listener.challenge(first)  # the same opening again: the old proof does not fit the new challenge
    with pytest.raises(BadSignatureError):
        listener.accept(proof)


def test_proof_is_accepted_once() -> None:
    _, dialer, _, listener = sides()
    proof = dialer.answer(listener.challenge(dialer.opening()))
    listener.accept(proof)
    with pytest.raises(MalformedFrameError):
        listener.accept(proof)


def test_signature_of_one_side_is_no_proof_of_the_other() -> None:
    _, dialer, _, listener = sides()
    challenge = pb.HelloFromListener.FromString(listener.challenge(dialer.opening())).challenge
    reflected = pb.HelloFromDialer(proof=pb.Proof(signature=challenge.signature, credential=challenge.credential))
    with pytest.raises(BadSignatureError):
        listener.accept(reflected.SerializeToString())


def test_other_certificate_than_the_pinned_one_breaks_the_signature() -> None:
    _, dialer, _, listener = sides(dialer_certificate=b"d" * 32)
    with pytest.raises(BadSignatureError):
        dialer.answer(listener.challenge(dialer.opening()))


def test_other_listener_than_the_certificate_says() -> None:
    _, dialer, _, _ = sides()
    _, _, _, other = sides()
    with pytest.raises(IdentityMismatchError):
        dialer.answer(other.challenge(dialer.opening()))


def test_wrong_run() -> None:
    _, dialer, _, listener = sides(dialer_run=b"q" * 32)
    with pytest.raises(WrongRunError):
        listener.challenge(dialer.opening())


@pytest.mark.parametrize(("theirs", "whom"), [(0, "other peer"), (2, "this peer")])
def test_version_says_who_must_upgrade(theirs: int, whom: str) -> None:
    _, dialer, _, listener = sides()
    message = pb.HelloFromListener.FromString(listener.challenge(dialer.opening()))
    message.challenge.protocol_version = theirs
    with pytest.raises(ProtocolVersionError) as caught:
        dialer.answer(message.SerializeToString())
    assert whom in (caught.value.fix or "")


def test_altered_fields_are_refused() -> None:
    _, dialer, _, listener = sides()
    good = listener.challenge(dialer.opening())
    for field, value in (("nonce", b"short"), ("nonce", b"n" * 32), ("public_key", b""), ("signature", b"s" * 64)):
        message = pb.HelloFromListener.FromString(good)
        setattr(message.challenge, field, value)
        with pytest.raises((BadSignatureError, MalformedFrameError, IdentityMismatchError)):
            dialer.answer(message.SerializeToString())
    large = pb.HelloFromListener.FromString(good)
    large.challenge.credential = bytes(5000)
    with pytest.raises(MalformedFrameError):
        dialer.answer(large.SerializeToString())


def test_unreadable_roles_are_refused() -> None:
    _, dialer, _, listener = sides()
    proof = pb.HelloFromDialer.FromString(dialer.answer(listener.challenge(dialer.opening())))
    for credential in (b"", b"\xc1", b"\x91\xa4king", b"\x05"):
        with pytest.raises(AdmissionRefusedError):
            OpenAuthorizer(RUN, []).admit(KeyPair.generate().peer_id, b"", credential)
    proof.proof.credential = b"\xc1"
    with pytest.raises(AdmissionRefusedError):
        listener.accept(proof.SerializeToString())


def test_token_must_have_its_length() -> None:
    _, dialer, _, listener = sides()
    dialer.answer(listener.challenge(dialer.opening()))
    with pytest.raises(MalformedFrameError, match="session token"):
        dialer.finish(listener.welcome(b"short", 60.0))


def test_many_or_long_addresses_are_cut() -> None:
    _, dialer, _, listener = sides(addresses=("x" * 1000, *(f"10.0.0.{n}:1" for n in range(100))))
    listener.accept(dialer.answer(listener.challenge(dialer.opening())))
    addresses = dialer.finish(listener.welcome(TOKEN, 60.0)).addresses
    assert len(addresses) == MAX_ADDRESSES - 1
    assert addresses[0] == "10.0.0.0:1"
