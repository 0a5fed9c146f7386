"""Plain values of a file or a command line as settings: dataclasses, checked key by key by their types.

A key is written with dots, `optimizer.lr`: a field whose type is a dataclass is a section of keys,
and one whose type is a dict takes any keys below it. Every mistake is a sentence that names the
key, what was expected and what came.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from dgt.utils.errors import UserError

Settings = TypeVar("Settings")


class Plain(str):
    """A scalar of YAML without quotes: what it is, the type of its key says.

    For a key of texts it is the text as it is written, be it `010`, `no` or `2026-01-31`.
    """

    def value(self) -> Any:
        """What YAML 1.2 (its core schema) reads: none, true or false, a number, or else the text."""
        if self in NULLS:
            return None
        if self in BOOLEANS:
            return BOOLEANS[self]
        for pattern, number in NUMBERS:
            if pattern.fullmatch(self):
                return number(self)
        return str(self)


class Word(Plain):
    """The value of a key on a command line: for a key of one value this itself, without YAML; only
    `null` is none.
    """

    def value(self) -> Any:
        """As for YAML, but of the words for none only `null`."""
        read = Plain.value(Plain(self.strip()))
        return str(self) if isinstance(read, str) or (read is None and self != "null") else read


NULLS = ("null", "Null", "NULL", "~", "")
BOOLEANS = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
QUOTED_NULLS = ('"null"', "'null'")
NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...] = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"), float),
    (
        re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
        lambda text: float(text.replace(".", "")),
    ),
)
PLAIN = "!plain"  # tag of scalars without quotes
STRUCTURED = ("[", "{", '"', "'")  # how YAML begins that is no plain scalar


class Loader(yaml.SafeLoader):
    """YAML without objects, in which scalars without quotes are `Plain`."""

    def resolve(self, kind: type, value: Any, implicit: Any) -> str:
        """The tag of a node that has none."""
        if kind is yaml.ScalarNode and implicit[0] and value != "<<":
            return PLAIN
        return str(super().resolve(kind, value, implicit))

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping; an error where it has a key twice, of which YAML for Python drops the first."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise ComposerError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
        return node


def _plain(loader: yaml.SafeLoader, node: yaml.Node) -> Plain:
    if not isinstance(node, yaml.ScalarNode):
        raise ConstructorError(None, None, "expected one value", node.start_mark)
    return Plain(loader.construct_scalar(node))


for _tag in (PLAIN, *(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null"))):
    Loader.add_constructor(_tag, _plain)


class Dumper(yaml.SafeDumper):
    """Puts quotes around texts that YAML 1.1 or 1.2 would read as something else."""


for _pattern, _ in NUMBERS:
    Dumper.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"(?:{_pattern.pattern})$"), list("-+.0123456789")
    )


def to_yaml(values: Mapping[str, Any]) -> str:
    """Nested plain values as YAML, from which `read_yaml` reads the same."""
    text: str = yaml.dump(values, Dumper=Dumper, sort_keys=False)
    return text


def plain_values(values: Any) -> Any:
    """Nested values with what YAML 1.2 reads in the place of each `Plain`."""
    if isinstance(values, Plain):
        return values.value()
    if isinstance(values, Mapping):
        return {
            str(key) if isinstance(key, Plain) else key: plain_values(value)
            for key, value in values.items()
        }
    if isinstance(values, list | tuple):
        return type(values)(plain_values(value) for value in values)
    return values


class Key(NamedTuple):
    """One key that can be set.

    Attributes:
        type: of its values, as annotated.
        default: its value where none is given.
        about: its description, from the docstring of the class.
    """

    type: Any
    default: Any
    about: str


def keys_of(
    settings: type, prefix: str = "", skip: Sequence[str] = (), **sections: type
) -> dict[str, Key]:
    """All keys of settings, in the order of their fields.

    Args:
        settings: a dataclass.
        prefix: of the keys, with its dot.
        skip: fields of any section that are no keys, as "data.seed".
        sections: dataclasses of fields whose annotation is a base of theirs.
    """
    keys: dict[str, Key] = {}
    types_of_fields, about = get_type_hints(settings), _descriptions(settings)
    for field in dataclasses.fields(settings):
        key = f"{prefix}{field.name}"
        kind = sections.get(field.name, types_of_fields[field.name])
        if not field.init or key in skip:
            continue
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            keys |= keys_of(kind, f"{key}.", skip)
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        keys[key] = Key(kind, default, about.get(field.name, ""))
    return keys


def _descriptions(settings: type) -> dict[str, str]:
    """The descriptions of a class's arguments, from its docstring or those of its bases."""
    descriptions: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        text = inspect.cleandoc(vars(base).get("__doc__") or "").partition("Args:\n")[2]
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE)
        descriptions |= {name: " ".join(about.split()) for name, about in entries}
    return descriptions


def check_values(
    values: Mapping[str, Any],
    known: Mapping[str, Key],
    changes: Iterable[tuple[str, Any]] = (),
) -> dict[str, Any]:
    """Check nested values and changes of single ones.

    Args:
        values: as a file holds them.
        known: from `keys_of`.
        changes: keys with their values, `Word`s where they come from a command line, as `pairs_of`
            has them; later ones count.

    Returns:
        The value of every key, converted to its type; the default where none was given.

    Raises:
        UserError: a key is unknown, a section or there twice, or a value is of another type.
    """
    given: dict[str, Any] = {}
    for key, value in _flat(values, known):
        if key in given:
            raise UserError(
                f"recipe key {key!r} is there twice, in its section and with dots, in the recipe or its "
                "base: write it in its section"
            )
        given[key] = value
    for key, value in changes:
        owner = _open_owner(key, known)
        if key in known or owner is None:
            whole = value if key in known else read_word(key, value)
            given |= dict(_flat({key: whole}, known))
            continue
        names = key.removeprefix(f"{owner}.").split(".")
        entries = given.get(owner) or {}
        if isinstance(entries, Word):  # the whole of it stood earlier on the command line
            entries = parse(owner, entries)
        given[owner] = _with_entry(entries, owner, names, read_word(key, value))
    checked = {}
    for key, what in known.items():
        checked[key] = convert(key, given[key], what.type) if key in given else what.default
    return checked


def pairs_of(words: Sequence[str]) -> list[tuple[str, Word]]:
    """The keys of a command line with their values.

    Example:
        >>> pairs_of(["--a.b", "1", "--c=2"])
        [('a.b', '1'), ('c', '2')]
    """
    pairs = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise UserError(f"keys of a recipe are written --section.key value, got {word!r}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"recipe key {key!r} needs a value after it")
            text = rest.pop(0)
        pairs.append((key, Word(text)))
    return pairs


def _flat(
    values: Mapping[Any, Any], known: Mapping[str, Key], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Nested values by key; UserError for an unknown key, or a value in the place of a section."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in known:
            yield key, value
        elif any(other.startswith(f"{key}.") for other in known):
            if not isinstance(value, Mapping):
                raise UserError(f"recipe key {key!r} must be a section of keys, got {shown(value)}")
            yield from _flat(value, known, f"{key}.")
        else:
            near = difflib.get_close_matches(key, known, n=2, cutoff=0.75)
            hint = f"did you mean {' or '.join(near)}?"
            raise UserError(
                f"unknown recipe key {key!r}; "
                + (hint if near else "`dgt train RECIPE --help` lists all keys")
            )


def _open_owner(key: str, known: Mapping[str, Key]) -> str | None:
    """The key of a dict that a longer key is an entry of."""
    parts = key.split(".")
    for length in range(1, len(parts)):
        owner = ".".join(parts[:length])
        if owner in known and get_origin(known[owner].type) is dict:
            return owner
    return None


def _with_entry(entries: Any, owner: str, names: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of a dict with one entry set, in nested dicts where there are more names."""
    if not isinstance(entries, Mapping):
        raise UserError(f"{owner} must be a mapping of keys, got {shown(entries)}")
    name, *rest = names
    if rest:
        value = _with_entry(entries.get(name) or {}, f"{owner}.{name}", rest, value)
    return {**entries, name: value}


def parse(key: str, text: str) -> Any:
    """The value that a text is in YAML, with `Plain` scalars.

    UserError where it is none, or goes on after it, as with a comment.
    """
    try:
        node = yaml.compose(text, Loader)
        if node is not None and text[node.end_mark.index :].strip():
            raise ValueError(f"after its value stands {text[node.end_mark.index :].strip()!r}")
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{key} cannot be read as YAML, got {shown(text)}: {reason}") from error


def read_word(key: str, value: Any) -> Any:
    """The value of a key that may have any type: a word of a command line in brackets, braces or
    quotes is YAML, any other is a `Plain` scalar itself.
    """
    if isinstance(value, Word) and value.lstrip().startswith(STRUCTURED):
        return parse(key, value)
    return value


def convert(key: str, value: Any, kind: Any) -> Any:
    """Convert a value to the type of its key.

    A text is taken for a number, true or false where the key takes no text.

    Raises:
        UserError: it is of another type.
    """
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for candidate in _readings(key, value, members):
        for member in members:
            if isinstance(candidate, str) == (member is str or get_origin(member) is Literal):
                fits, converted = _fit(candidate, member)
                if fits:
                    return converted
    raise UserError(f"{key} must be {in_words(kind)}, got {shown(value)}")


def _readings(key: str, value: Any, members: Sequence[Any]) -> list[Any]:
    """What a value may be for a key that takes one of several types, the likeliest first."""
    if not isinstance(value, str):
        return [value]
    if isinstance(value, Word):
        if str in members and types.NoneType in members and value in QUOTED_NULLS:
            return ["null"]
        if any(get_origin(member) in (list, tuple, dict) for member in members):
            return [plain_values(value), parse(key, value)]
    if isinstance(value, Plain):
        return [value.value(), str(value)]
    read = Plain(value).value()
    return [value, *([] if read is None else [read])]


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether a value is of a type, and the value in this type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True, value
    if kind is types.NoneType:
        return value is None, None
    if origin is Literal:
        return value in arguments, value
    if kind in (int, float) and isinstance(value, bool):
        return False, None
    if kind is float and isinstance(value, int):
        return abs(value) < 1e308, float(max(min(value, 10**308), -(10**308)))
    if origin is dict:
        names = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        return (True, plain_values(value)) if names and _is_plain(value) else (False, None)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            return False, None
        open_ended = origin is list or arguments[-1] is Ellipsis
        wanted = [arguments[0]] * len(value) if open_ended else list(arguments)
        if len(wanted) != len(value):
            return False, None
        entries = []
        for entry, wish in zip(value, wanted, strict=True):
            try:
                entries.append(convert("", entry, wish))
            except UserError:
                return False, None
        return True, origin(entries)
    return isinstance(value, kind), value


def _is_plain(value: Any) -> bool:
    """Whether a value can be written as JSON: YAML can have lists that contain themselves."""
    try:
        json.dumps(value, default=str)
    except (TypeError, ValueError):
        return False
    return True


def shown(value: Any) -> str:
    """A value as YAML has it, a word as it stands, in at most 100 characters."""
    plain = _is_plain(value)
    if plain and not isinstance(value, Word):
        value = plain_values(value)
    text = json.dumps(value, ensure_ascii=False, default=str) if plain else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


SINGULAR = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
PLURAL = {int: "integers", float: "numbers", str: "texts"}


def in_words(kind: Any) -> str:
    """A type as a person says it.

    Example:
        >>> in_words(list[str] | None)
        'a list of texts or null'
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is types.NoneType:
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(member) for member in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (list, tuple):
        several = PLURAL[arguments[0]]
        open_ended = origin is list or arguments[-1] is Ellipsis
        return f"a list of {several}" if open_ended else f"{len(arguments)} {several}"
    if origin is dict:
        return "a mapping of keys"
    return SINGULAR[kind]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key as sections in sections.

    Example:
        >>> nested({"a.b": 1, "a.c": 2})
        {'a': {'b': 1, 'c': 2}}
    """
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


def build(settings: type[Settings], values: Mapping[str, Any], **sections: type) -> Settings:
    """Build settings from nested values of the right types; `sections` as of `keys_of`."""
    kinds = get_type_hints(settings) | sections
    arguments = {
        name: build(kinds[name], value) if dataclasses.is_dataclass(kinds[name]) else value
        for name, value in values.items()
    }
    return settings(**arguments)


def help_text(known: Mapping[str, Key]) -> str:
    """Every key with its type, default and description."""
    lines = []
    for key, (kind, default, about) in known.items():
        lines.append(f"  --{key}: {in_words(kind)} (default: {shown(default)})")
        lines.append(f"      {about}")
    return "\n".join(lines)
