"""Scripts are read as bash runs them: the same words reach `deepspeed`."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rlhf.contrib.deepspeed_chat.shell import LoopError, Shell
from rlhf.errors import ConfigError

FRAGMENTS = [
    'A=1; B="x $A"; deepspeed $A $B "$B" \'$B\' ${A}2',
    "A=${U:-d}; B=${U-e}; deepspeed ${A} $B ${A:+yes}",
    "N=8; G=64; M=3; deepspeed $(($G/$N)) $((G / M)) $(( (G - 1) % 5 * -1 ))",
    'Z=; if [ "$Z" == "" ]; then Z=3; fi; deepspeed $Z',
    "Z=2; if [ $Z -eq 1 ]; then Z=a; elif [ $Z -ge 2 ]; then Z=b; else Z=c; fi; deepspeed $Z",
    'O=true; if [ "$O" == true ]\nthen\n  O="--offload"\nelse\n  O=""\nfi\ndeepspeed x $O y',
    'N=2; if [ "$N" -ne "1" -a -f "$NOWHERE" ]; then N=9; fi; deepspeed $N',
    "N=2; if [ $N -ne 1 -a $N -lt 3 ]; then N=9; fi; if [ $N -le 8 -o $N -gt 9 ]; then N=0; fi; deepspeed $N",
    'A=1; [ -z "$A" ] && A=2; [ -n "$A" ] && B=3; [ a = b ] || C=4; deepspeed $A $B $C',
    "if ! [ a == b ]; then deepspeed yes; fi; if [[ ab =~ ^a && 1 -lt 2 ]]; then deepspeed both; fi",
    'L=" --dim 8 \\\n   --scope x. "\nCMD="main.py \\\n  ${L} \\\n --end"\ndeepspeed --num_gpus 2 \\\n  $CMD',
    "deepspeed a > /dev/null 2>&1; deepspeed b &> /dev/null # a comment\ndeepspeed c | cat",
    "deepspeed first; exit 0; deepspeed second",
    'cmd="deepspeed main.py --x 1"\n$cmd &> /dev/null',
    'deepspeed "$1" $2 ${10} $# "$@"',
    "A='it''s'; deepspeed $A \"a\\\\b\" --k=v'w x'",
]


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_fragments_are_read_as_bash_runs_them() -> None:
    arguments = ["script", *"abcdefghij"]
    noting = "deepspeed() { printf '%s\\0' \"$@\" >&3; printf '\\n\\0' >&3; }\n"
    for fragment in FRAGMENTS:
        program = f"exec 3>&1; {noting}{fragment}\n"
        done = subprocess.run(["bash", "-c", program, *arguments], capture_output=True, text=True, timeout=20)
        expected = [call.split("\0")[:-1] for call in done.stdout.split("\n\0")[:-1]]
        assert expected, done.stderr
        assert [words[1:] for words, _ in Shell(arguments=arguments).run(fragment)] == expected, fragment


def test_variable_without_a_value_stays_and_counts_as_empty_in_tests() -> None:
    shell = Shell()
    text = 'A=$1\nB=${HL_DATA}\nif [ "$A" == "" ]; then C=c; fi\ndeepspeed $A $B $C'
    assert [words for words, _ in shell.run(text)] == [["deepspeed", "$A", "${HL_DATA}", "c"]]


def test_argument_of_any_number_is_empty() -> None:
    text = f"[ -z ${'9' * 5000} ] && deepspeed a$1 b${{{'0' * 5000}1}}"
    assert [words for words, _ in Shell(arguments=["script", "x"]).run(text)] == [["deepspeed", "ax", "bx"]]


def test_values_of_the_caller_are_not_replaced() -> None:
    shell = Shell(fixed={"A": "mine"})
    assert [words for words, _ in shell.run("A=theirs; B=$A; deepspeed $A $B")] == [["deepspeed", "mine", "mine"]]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("if nvidia; then x; fi", "if nvidia ; then x ; fi: cannot be decided without running it; paste the deepspeed"),
        ('if [ "$(id)" == x ]; then y; fi', "[ $(id) == x ]: cannot be decided without running its commands; paste"),
        ("[ z $B ] && x", "[ z $B ]: not a test that is evaluated here; paste the deepspeed command"),
        ("[ a -eq b ] && x", "[ a -eq b ]: not a test that is evaluated here; paste the deepspeed command"),
        ("f() { x; }", "f ( ) { x ; }: not evaluated here; paste the deepspeed command that it starts"),
        ("case $x in", "case $x in: not evaluated here; paste the deepspeed command that it starts"),
        ("if [ a ]; then x", "fi: missing at the end of the script; complete the script, or paste"),
        ("A=$((1/0))", "$((1/0)): cannot be calculated, got 1/0; paste the deepspeed command"),
        ('A="b', 'A="b: not a valid shell command (No closing quotation); correct its quotes'),
    ],
)
def test_parts_that_are_not_evaluated_are_refused(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        list(Shell().run(text))
    assert str(error.value).startswith(line)


def test_loop_is_refused_only_if_it_would_run() -> None:
    loop = "for z in {2..3}; do\n  for l in a b; do\n    echo\n  done\ndone"
    with pytest.raises(LoopError, match="a loop may start several trainings"):
        list(Shell().run(loop))
    assert [words for words, _ in Shell().run(f"if [ a == b ]; then\n{loop}\nfi\ndeepspeed x")] == [["deepspeed", "x"]]
