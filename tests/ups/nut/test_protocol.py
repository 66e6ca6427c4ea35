"""upsd's protocol, bytes to answers: what 2.8.0 sends, what quoting means, and that no bytes do more than raise."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.ups.nut.protocol import (
    MAX_ANSWERS,
    MAX_LINE_BYTES,
    MAX_LIST_BYTES,
    MAX_ROWS,
    Answer,
    Decoder,
    Err,
    Line,
    NutError,
    Ok,
    Table,
    encode,
    split,
)

TEXT = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), max_size=60)


def answers_in(*chunks: bytes) -> list[Answer]:
    decoder = Decoder()
    return [answer for chunk in chunks for answer in decoder.feed(chunk)]


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"OK\n", Ok()),
        (b"OK Goodbye\n", Ok(("Goodbye",))),
        (b"OK TRACKING 7c2a\n", Ok(("TRACKING", "7c2a"))),
        (b"ERR DATA-STALE\n", Err("DATA-STALE")),
        (b"ERR FAILED later\n", Err("FAILED", ("later",))),
        (b'VAR dsim ups.status "OB DISCHRG"\n', Line(("VAR", "dsim", "ups.status", "OB DISCHRG"))),
        (b'VAR dsim ups.status ""\n', Line(("VAR", "dsim", "ups.status", ""))),
        (b'VAR a b "say \\"x\\" \\\\ y"\n', Line(("VAR", "a", "b", 'say "x" \\ y'))),
        (b'VAR a b "\xff\xfe"\n', Line(("VAR", "a", "b", "��"))),
        (b"1.3\r\n", Line(("1.3",))),
        (b"\n", Line(())),
        (b"BEGIN LIST UPS\nEND LIST UPS\n", Table(("UPS",), ())),
        (
            b'BEGIN LIST VAR su\nVAR su a "1"\nVAR su b "2 3"\nEND LIST VAR su\n',
            Table(("VAR", "su"), (("a", "1"), ("b", "2 3"))),
        ),
    ],
)
def test_an_answer_is_what_upsd_means(sent: bytes, answer: Answer) -> None:
    """Whole, and byte by byte: TCP cuts where it likes."""
    assert answers_in(sent) == [answer]
    assert answers_in(*(sent[at : at + 1] for at in range(len(sent)))) == [answer]


def test_answers_come_in_order_and_a_half_one_waits() -> None:
    decoder = Decoder()
    assert decoder.is_between
    assert decoder.feed(b"OK\nERR X\nVAR a b") == [Ok(), Err("X")]
    assert not decoder.is_between
    assert decoder.feed(b' "c"\nBEGIN LIST UPS\n') == [Line(("VAR", "a", "b", "c"))]
    assert not decoder.is_between
    assert decoder.feed(b"END LIST UPS\n") == [Table(("UPS",), ())]
    assert decoder.is_between


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"OK\n" * (MAX_ANSWERS + 1), "more answers than any client asks for"),
        (b"x" * (MAX_LINE_BYTES + 1), "line of more than"),
        (b"x" * (MAX_LINE_BYTES + 1) + b"\n", "line of more than"),
        (b'VAR a b "c\n', "quotes that do not close"),
        (b"VAR a b \\\n", "quotes that do not close"),
        (b"BEGIN LIST UPS\nBEGIN LIST VAR a\n", "inside a list"),
        (b"END LIST UPS\n", "had not begun"),
        (b"BEGIN LIST UPS\nEND LIST VAR a\n", "had not begun"),
        (b"BEGIN LIST VAR a\nVAR b c d\n", "does not belong"),
        (b"BEGIN LIST VAR a\nERR DATA-STALE\n", "does not belong"),
        (b"BEGIN LIST U\n" + b"U\n" * (MAX_ROWS + 2), "list of more than"),
        (b"BEGIN LIST U\n" + (b"U " + b"x" * 4000 + b"\n") * (MAX_LIST_BYTES // 4000 + 1), "list of more than"),
    ],
)
def test_what_is_no_answer_ends_the_stream(sent: bytes, why: str) -> None:
    """After it nothing can be told from anything: the next good line might be the rest of a bad one."""
    decoder = Decoder()
    with pytest.raises(NutError, match=why):
        decoder.feed(sent)
    with pytest.raises(NutError, match=why):
        decoder.feed(b"OK\n")
    assert not decoder.is_between


def test_a_list_without_an_end_is_bounded() -> None:
    """A peer that never stops sending costs no more memory than a list may have."""
    decoder = Decoder()
    decoder.feed(b"BEGIN LIST U\n")
    for _ in range(MAX_ROWS):
        decoder.feed(b"U a\n")
    with pytest.raises(NutError, match="list of more than"):
        decoder.feed(b"U a\n" * 2)
    assert (decoder._rows, decoder._rest) == ([], b"")


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (("GET", "VAR", "su", "ups.status"), b"GET VAR su ups.status\n"),
        (("PASSWORD", "two words"), b'PASSWORD "two words"\n'),
        (("PASSWORD", 'a"b\\c'), b'PASSWORD "a\\"b\\\\c"\n'),
        (("PASSWORD", ""), b'PASSWORD ""\n'),
        (("PASSWORD", "#=x"), b'PASSWORD "#=x"\n'),
        (("LOGIN", "süd"), "LOGIN süd\n".encode()),
    ],
)
def test_a_request_is_quoted_where_it_must_be(words: tuple[str, ...], sent: bytes) -> None:
    assert encode(*words) == sent


@pytest.mark.parametrize("word", ["a\nFSD su", "a\rb", "a\0b", "x" * MAX_LINE_BYTES])
def test_no_word_smuggles_a_second_request_in(word: str) -> None:
    """A password with a line break would else be a command."""
    with pytest.raises(NutError) as caught:
        encode("PASSWORD", word)
    assert word not in str(caught.value)


@given(st.lists(TEXT, min_size=1, max_size=6))
def test_what_is_encoded_is_split_into_the_same_words(words: list[str]) -> None:
    assert split(encode(*words).decode().rstrip("\n")) == tuple(words)


PIECES = st.sampled_from(
    [
        b"OK",
        b"ERR",
        b"VAR",
        b"BEGIN LIST",
        b"END LIST",
        b" su",
        b"\n",
        b"\r\n",
        b'"',
        b"\\",
        b" ",
        b"\xff",
        b"\0",
        b"UPS",
    ]
)


@settings(max_examples=300)
@given(st.lists(PIECES | st.binary(max_size=40), max_size=60), st.randoms(use_true_random=False))
def test_no_bytes_raise_anything_else_and_no_cut_matters(pieces: list[bytes], dice: random.Random) -> None:
    """Fed whole or in any pieces: the same answers, and then the same error or none."""
    data = b"".join(pieces)
    cuts = sorted(dice.randrange(len(data) + 1) for _ in range(5))
    chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert _outcome([data]) == _outcome(chunks)


def _outcome(chunks: list[bytes]) -> tuple[list[Answer], str]:
    decoder = Decoder()
    answers: list[Answer] = []
    # Line by line, so that what came before an error is seen: a chunk that raises hands nothing out.
    for line in b"".join(chunks).splitlines(keepends=True) if len(chunks) == 1 else _lines(chunks):
        try:
            answers += decoder.feed(line)
        except NutError as error:
            return answers, str(error)
    return answers, ""


def _lines(chunks: list[bytes]) -> list[bytes]:
    return [piece for chunk in chunks for piece in chunk.splitlines(keepends=True)]


@pytest.mark.slow
def test_a_million_inputs() -> None:
    """Made of what the protocol is made of, and of noise: nothing but NutError, and never much memory."""
    dice = random.Random(20)
    words = [
        b"OK",
        b"ERR",
        b"VAR",
        b"BEGIN LIST ",
        b"END LIST ",
        b"su ",
        b"\n",
        b"\n",
        b'"',
        b"\\",
        b" ",
        b"ups.status",
    ]
    raised = 0
    for _ in range(1_000_000):
        decoder = Decoder()
        data = b"".join(dice.choices(words, k=dice.randrange(12)))
        if dice.random() < 0.3:
            data += dice.randbytes(dice.randrange(30)) + b"\n"
        try:
            for answer in decoder.feed(data):
                assert isinstance(answer, Ok | Err | Line | Table)
        except NutError:
            raised += 1
        assert len(decoder._rest) <= MAX_LINE_BYTES
    assert 0 < raised < 1_000_000
