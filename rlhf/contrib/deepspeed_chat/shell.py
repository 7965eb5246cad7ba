"""Read shell scripts as far as training scripts need it, and return the commands that they would run.

Variables, positional arguments, arithmetic, tests, `if`, `&&` and `||` are evaluated. Nothing is run: the value of
`$(...)` is unknown, and loops, functions and `case` are refused. A variable without a value stays in a word as `$NAME`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.errors import ConfigError

UNKNOWN = "$(...)"
"""The value of a command substitution."""

_PASTE = "paste the deepspeed command that it starts"
_SEPARATORS = ("\n", ";", ";;", "&", "(", ")", "{", "}", "&&", "||", "|", "|&")
_LOOPS = ("for", "while", "until", "select")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:(\w+|[@*#])|\{(\w+|[@*#])(?:(:?)([-=+?])([^}]*))?\})")
_ONLY_REFERENCE = re.compile(r"\$(?:\w+|\{\w+\})")
_REDIRECTION = re.compile(r"(?:&>>?|\d*>>?(?:&(?:\d|-))?\|?|<(?=\s))")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod}
_COMPARISONS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_UNARY: Mapping[str, Callable[[str], bool]] = {
    "-z": lambda value: not value,
    "-n": bool,
    "-f": lambda path: Path(path).is_file(),
    "-d": lambda path: Path(path).is_dir(),
    "-e": lambda path: Path(path).exists(),
}


class LoopError(ConfigError):
    """A script contains a loop, which may start several trainings."""


@dataclass(frozen=True)
class Word:
    """A word: its parts, each a text and its quote (`'`, `"` or empty); only unquoted values are split at blanks."""

    parts: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The word without quotes."""
        return "".join(text for text, _ in self.parts)

    @property
    def bare(self) -> str:
        """The word if no part of it is quoted, else empty: keywords and operators are never quoted."""
        return "" if any(quote for _, quote in self.parts) else self.text


@dataclass
class Shell:
    """The state of a shell.

    Attributes:
        variables: the values of variables.
        fixed: values that assignments in the script do not replace.
        arguments: the positional arguments, `$0` first.
        exported: names of variables that programs and scripts of this shell see.
    """

    variables: dict[str, str] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    exported: set[str] = field(default_factory=set)
    _unset: dict[str, str] = field(default_factory=dict)  # variables that were set to one without a value

    def __post_init__(self) -> None:
        self.variables |= self.fixed

    def run(self, text: str) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Yield the words of each command that would run, with the assignments in front of it.

        Assignments alone change the state, and are not yielded; nor are tests.

        Raises:
            LoopError: a loop would run.
            ConfigError: the text is not valid, or has something else that is not evaluated.
        """
        yield from _Reader(self, _split(text)).read_list(True)

    def expand(self, word: Word, *, is_test: bool = False) -> list[str]:
        """Return the words that a word becomes; in a test, variables without a value are empty."""
        if word.text == "$@":
            return [*self.arguments[1:]]
        fields: list[str] = []
        is_open = False  # the next text belongs to the last field
        for text, quote in word.parts:
            value = text if quote == "'" else self.expand_text(text, is_test=is_test)
            pieces = [value] if quote or "$" not in text else value.split()
            if pieces and is_open and not (value[0].isspace() if value and not quote else False):
                fields[-1] += pieces.pop(0)
            fields += pieces
            is_open = bool(fields) and not (value[-1:].isspace() and not quote)
        if not fields and not is_test and _ONLY_REFERENCE.fullmatch(word.bare):
            return [word.text]  # an empty value may be the one that the user must fill in
        return fields

    def expand_text(self, text: str, *, is_test: bool = False) -> str:
        """Return a text with the values of its variables."""
        text = _replace_substitutions(text, lambda inner: str(self._calculate(inner)))
        return _REFERENCE.sub(lambda match: self._value(match, is_test=is_test), text)

    def assign(self, name: str, value: str) -> None:
        """Set a variable, unless its value is fixed or the new value is another variable without one."""
        if name in self.fixed:
            return
        self.variables.pop(name, None)
        self._unset.pop(name, None)
        if not _ONLY_REFERENCE.fullmatch(value):
            self.variables[name] = value
        elif not value.strip("${}").isdecimal():
            self._unset[name] = value

    def lookup(self, name: str) -> str | None:
        """Return the value of a variable or of a positional argument; None if it has none."""
        if name in ("@", "*"):
            return " ".join(self.arguments[1:]) or None
        if name == "#":
            return str(max(len(self.arguments) - 1, 0))
        if name.isdecimal():
            number = int(name[-10:]) if len(name.lstrip("0")) <= 10 else len(self.arguments)
            return self.arguments[number] if number < len(self.arguments) else None
        return self.variables.get(name)

    def _value(self, match: re.Match[str], *, is_test: bool) -> str:
        name = match.group(1) or match.group(2)
        value, sign, word = self.lookup(name), match.group(4), match.group(5)
        if match.group(3) and value == "":
            value = None
        if sign == "+":
            return self.expand_text(word) if value is not None else ""
        if value is not None:
            return value
        if sign in ("-", "="):
            return self.expand_text(word)
        return "" if is_test else self._unset.get(name, match.group())

    def _calculate(self, text: str) -> int:
        """Return the value of `$((text))`."""
        known = _NAME.sub(lambda match: self.variables.get(match.group(), match.group()), self.expand_text(text))
        try:
            return _calculate_node(ast.parse(known.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"$(({text})): cannot be calculated, got {known.strip()}; {_PASTE}") from error


def _calculate_node(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate_node(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _calculate_node(node.left), _calculate_node(node.right)
        if isinstance(node.op, ast.Div):
            return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # towards 0, as in a shell
        if type(node.op) in _OPERATIONS:
            return int(_OPERATIONS[type(node.op)](left, right))
    raise ValueError("not an operation on whole numbers")


def _replace_substitutions(text: str, calculate: Callable[[str], str]) -> str:
    """Return a text with the results of its `$((...))`, and UNKNOWN for its `$(...)` and `` `...` ``."""
    text = re.sub(r"`[^`]*`", lambda _: UNKNOWN, text)
    while (start := text.find("$(")) >= 0:
        end = _find_end(text, start + 1)
        inner = text[start + 2 : end]
        is_sum = inner.startswith("(") and inner.endswith(")")
        text = text[:start] + (calculate(inner[1:-1]) if is_sum else "\0") + text[end + 1 :]
    return text.replace("\0", UNKNOWN)


def _find_end(text: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if not depth:
            return position
    raise ConfigError(f"{shorten(text[start - 1 :])}: not a valid shell command; close its parenthesis")


def shorten(text: str) -> str:
    """Return the first line of a text, or its beginning."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 60 else line[:57] + "..."


def _split(text: str) -> list[Word | str]:
    """Return the words and operators of a text, without comments and redirections."""
    text = re.sub(r"\\[ \t]*\r?\n", " ", text).replace("\r\n", "\n")
    tokens: list[Word | str] = []
    parts: list[tuple[str, str]] = []
    position, is_target = 0, False  # the next word is the target of a redirection

    def end_word() -> None:
        nonlocal is_target
        if parts and not is_target:
            tokens.append(_join_parts(parts))
        is_target = is_target and not parts
        parts.clear()

    while position < len(text):
        character = text[position]
        if not parts and (redirection := _REDIRECTION.match(text, position)):
            is_target = not re.search(r"&[\d-]$", redirection.group())
            position = redirection.end()
        elif not parts and character == "#":
            position = (text + "\n").index("\n", position)
        elif character in " \t":
            end_word()
            position += 1
        elif character in "\n;&()" or (character == "|" and not parts):
            end_word()
            is_target = False
            length = 2 if text[position : position + 2] in _SEPARATORS else 1
            tokens.append(text[position : position + length])
            position += length
        else:
            part, position = _read_part(text, position)
            parts.append(part)
    end_word()
    return tokens


def _read_part(text: str, start: int) -> tuple[tuple[str, str], int]:
    """Return (a quoted text, a variable, a substitution or one character; the position after it)."""
    if text[start] in "'\"":
        end = _find_quote(text, start)
        quoted = text[start + 1 : end]
        return (re.sub(r'\\(["\\`])', r"\1", quoted) if text[start] == '"' else quoted, text[start]), end + 1
    if text[start] == "\\":
        return (text[start + 1 : start + 2], "'"), start + 2
    end = start
    if text.startswith("$(", start):
        end = _find_end(text, start + 1)
    elif text.startswith("${", start):
        end = max(text.find("}", start), start)
    return (text[start : end + 1], ""), end + 1


def _find_quote(text: str, start: int) -> int:
    """Return the position of the quote that closes the one at `start`."""
    quote, position = text[start], start + 1
    while position < len(text):
        if text[position] == quote:
            return position
        if quote == '"' and text.startswith("$(", position):
            position = _find_end(text, position + 1)
        position += 2 if quote == '"' and text[position] == "\\" else 1
    line = text[text.rfind("\n", 0, start) + 1 :]
    raise ConfigError(f"{shorten(line)}: not a valid shell command (No closing quotation); correct its quotes")


def _join_parts(parts: Sequence[tuple[str, str]]) -> Word:
    """Return a word, with adjacent parts without quotes in one."""
    joined: list[tuple[str, str]] = []
    for text, quote in parts:
        if joined and not quote and not joined[-1][1]:
            joined[-1] = (joined[-1][0] + text, "")
        else:
            joined.append((text, quote))
    return Word(tuple(joined))


_Commands = Generator[tuple[list[str], dict[str, str]], None, bool | None]
"""The commands that a part of a script runs; returns if it succeeds, None if that is not known."""


class _Reader:
    """Walks over the tokens of a script; parts that would not run are read, but not evaluated."""

    def __init__(self, shell: Shell, tokens: list[Word | str]) -> None:
        self.shell = shell
        self.tokens = tokens
        self.position = 0
        self.has_exited = False

    def read_list(self, runs: bool, ends: Sequence[str] = ()) -> _Commands:
        """Yield the commands up to one of the keywords `ends`, which is not consumed."""
        status: bool | None = True
        link = ""
        while self.position < len(self.tokens):
            keyword = self._keyword()
            if keyword in ends:
                return status
            if keyword in _SEPARATORS:
                link = keyword if keyword in ("&&", "||") else ""
                self.position += 1
                continue
            is_skipped = (link == "&&" and status is False) or (link == "||" and status is not False)
            runs_now = runs and not self.has_exited and not is_skipped
            if keyword == "if":
                yield from self._read_if(runs_now)
            elif keyword in _LOOPS:
                self._read_loop(runs_now)
            elif keyword in ("case", "function") or self.tokens[self.position + 1 : self.position + 3] == ["(", ")"]:
                raise ConfigError(f"{self._describe_line()}: not evaluated here; {_PASTE}")
            else:
                words = self._take_command()
                if runs_now:
                    status = yield from self._run_command(words)
        if ends:
            raise ConfigError(f"{ends[-1]}: missing at the end of the script; complete the script, or {_PASTE}")
        return status

    def _keyword(self) -> str:
        """Return the operator at the position, or the word if it is not quoted."""
        token = self.tokens[self.position]
        return token if isinstance(token, str) else token.bare

    def _describe_line(self) -> str:
        end = self.position
        while end < len(self.tokens) and self.tokens[end] != "\n":
            end += 1
        words = (token if isinstance(token, str) else token.text for token in self.tokens[self.position : end])
        return shorten(" ".join(words))

    def _read_if(self, runs: bool) -> _Commands:
        line = self._describe_line()
        is_decided = not runs
        while self._keyword() != "fi":
            keyword = self._keyword()
            self.position += 1
            is_chosen = not is_decided
            if keyword != "else":
                status = self._drop_commands(self.read_list(not is_decided, ("then",)))
                self.position += 1
                if not is_decided and status is None:
                    raise ConfigError(f"{line}: cannot be decided without running it; {_PASTE}")
                is_chosen = not is_decided and bool(status)
            yield from self.read_list(is_chosen, ("elif", "else", "fi"))
            is_decided = is_decided or is_chosen
        self.position += 1
        return True

    @staticmethod
    def _drop_commands(commands: _Commands) -> bool | None:
        """Return what commands return, without yielding them: those of a condition start no training."""
        while True:
            try:
                next(commands)
            except StopIteration as end:
                status: bool | None = end.value
                return status

    def _read_loop(self, runs: bool) -> None:
        line = self._describe_line()
        depth = 0
        is_start = True  # of a command
        while self.position < len(self.tokens):
            keyword = self._keyword()
            if is_start:
                depth += (keyword in _LOOPS) - (keyword == "done")
            is_start = keyword in _SEPARATORS or keyword in ("do", "then", "else")
            self.position += 1
            if not depth:
                break
        if runs:
            raise LoopError(f"{line}: a loop may start several trainings; {_PASTE}")

    def _take_command(self) -> list[Word]:
        """Return the words of the command at the position, of a pipeline's first program."""
        words: list[Word] = []
        is_first = True
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token in ("|", "|&"):
                is_first = False
            elif isinstance(token, Word):
                words += [token] if is_first else []
            elif token != "\n" and words and words[0].bare == "[[" and words[-1].bare != "]]":
                words.append(Word(((token, ""),)))  # && and ||
            else:
                break
            self.position += 1
        return words

    def _run_command(self, words: list[Word]) -> _Commands:
        """Yield a command, or set the variables that it assigns."""
        is_negated = bool(words) and words[0].bare == "!"
        words = words[is_negated:]
        if words and words[0].bare in ("[", "[[", "test"):
            return self._test(words) != is_negated
        is_export = bool(words) and words[0].bare in ("export", "readonly", "declare", "local")
        rest = words[is_export:]
        assigned = {}
        while rest and (match := _ASSIGNMENT.match(rest[0].parts[0][0])) and not rest[0].parts[0][1]:
            parts = ((match.group(2), ""), *rest.pop(0).parts[1:])
            values = [text if quote == "'" else self.shell.expand_text(text) for text, quote in parts]
            assigned[match.group(1)] = "".join(values)
        if is_export or not rest:
            for name, value in assigned.items():
                self.shell.assign(name, value)
            if is_export:
                self.shell.exported |= {*assigned, *(word.text for word in rest)}
            return True
        expanded = [part for word in rest for part in self.shell.expand(word)]
        if expanded[:1] == ["exit"]:
            self.has_exited = True
        elif expanded:
            yield expanded, assigned
        return None

    def _test(self, words: list[Word]) -> bool:
        """Return the result of `[ ... ]`, `[[ ... ]]` or `test`."""
        line = shorten(" ".join(word.text for word in words))
        operands = [" ".join(self.shell.expand(word, is_test=True)) for word in words[1:]]
        if words[0].bare != "test":
            operands = operands[:-1]
        if any(UNKNOWN in operand for operand in operands):
            raise ConfigError(f"{line}: cannot be decided without running its commands; {_PASTE}")
        try:
            return _decide(operands)
        except (ValueError, LookupError, re.error) as error:
            raise ConfigError(f"{line}: not a test that is evaluated here; {_PASTE}") from error


def _decide(operands: list[str]) -> bool:
    """Return the result of a test's operands; `-o` binds less than `-a`, and that less than `!`.

    Raises:
        ValueError, LookupError: an operator is not known, a number is none, or an operand is missing.
    """
    for names, combine in ((("-o", "||"), any), (("-a", "&&"), all)):
        places = [place for place, operand in enumerate(operands) if operand in names and 0 < place < len(operands) - 1]
        if places:
            ends = zip([0, *(place + 1 for place in places)], [*places, len(operands)])
            return combine([_decide(operands[start:end]) for start, end in ends])
    if operands[:1] == ["!"]:
        return not _decide(operands[1:])
    if len(operands) < 2:
        return bool(operands and operands[0])
    if len(operands) == 2:
        return _UNARY[operands[0]](operands[1])
    left, sign, right = operands
    if sign in _COMPARISONS:
        return bool(_COMPARISONS[sign](int(left), int(right)))
    if sign == "=~":
        return re.search(right, left) is not None
    if sign in ("=", "==", "!="):
        return (left == right) == (sign != "!=")
    raise ValueError(sign)
