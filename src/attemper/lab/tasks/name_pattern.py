"""Patterns that say where a file's class stands in its name: '{label}_{group}_*.wav'."""

import re
from typing import NamedTuple

from attemper.errors import ParameterError

FIELDS = ("label", "group")
TOKEN = re.compile(r"\{(?P<field>[^{}/]*)\}|(?P<any>\*+)|(?P<digits>#+)|(?P<literal>[^{}*#]+)|(?P<odd>[{}])")


class Fields(NamedTuple):
    """What a name says."""

    label: str
    group: str | None


class NamePattern:
    """A pattern for the path of a file below the folder of its set.

    {label} is the class. Files with the same {group}, such as a speaker, are never separated. `*` stands for anything
    and `#` for a number. None of them reaches across '/'. Each is as short as it can be, from left to right. Upper and
    lower case count as the same, but in {label} and {group}.

    >>> NamePattern("{label}_{group}_#.wav").match("3_jackson_0.wav")
    Fields(label='3', group='jackson')
    >>> NamePattern("{label}_#.jpg").match("basset_hound_12.JPG")
    Fields(label='basset_hound', group=None)
    """

    def __init__(self, text: str) -> None:
        self.text = text
        parts: list[str] = []
        kinds: list[str] = []
        for token in TOKEN.finditer(text):
            kind = token.lastgroup or ""
            if kind == "odd":
                raise self._error(f"it has a '{token['odd']}' alone")
            if kind == "field":
                kind = token["field"]
                if kind not in FIELDS:
                    raise self._error(f"it has the field {{{kind}}}")
                if kind in kinds:
                    raise self._error(f"it has {{{kind}}} twice")
            if kinds and kind in (*FIELDS, "any") and kinds[-1] in (*FIELDS, "any"):
                raise self._error("two parts of any length stand side by side, so that nothing says where one ends")
            kinds.append(kind)
            parts.append(
                {"any": "[^/]*?", "digits": "[0-9]+?"}.get(kind)
                or (f"(?P<{kind}>[^/]+?)" if kind in FIELDS else re.escape(token[0]))
            )
        if "label" not in kinds:
            raise self._error("it has no {label}")
        self._expression = re.compile("".join(parts), re.IGNORECASE)

    def match(self, name: str) -> Fields | None:
        """What the path of a file says; None: it does not fit.

        name: relative to the folder, with '/' between its parts.
        """
        found = self._expression.fullmatch(name)
        if found is None:
            return None
        fields = found.groupdict()
        return Fields(fields["label"], fields.get("group"))

    def _error(self, wrong: str) -> ParameterError:
        return ParameterError(
            f"The pattern '{self.text}' cannot be used: {wrong}. A pattern such as '{{label}}_{{group}}_*.wav' has one "
            "{label}, perhaps a {group}, * for anything and # for a number, with other characters between them."
        )
