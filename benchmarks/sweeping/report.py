"""What a sweep found, in words: counts, tables, the models of every reason, and the difference between two sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from sweeping.outcomes import ACTS, CRASH, NO_OP, OUTCOMES, REFUSED, Outcome

Found = Mapping[str, Mapping[str, Mapping[str, Outcome]]]
"""Library → model → recipe → outcome."""


def pairs(found: Found) -> Iterator[tuple[str, str, str, Outcome]]:
    """(library, model, recipe, outcome) of every pair."""
    for library, models in found.items():
        for model, row in models.items():
            for recipe, outcome in row.items():
                yield library, model, recipe, outcome


def counts(found: Found) -> dict[str, int]:
    """How many pairs had each outcome."""
    counted = Counter(outcome.kind for *_, outcome in pairs(found))
    return {kind: counted[kind] for kind in OUTCOMES}


def by_recipe(found: Found) -> dict[str, dict[str, int]]:
    """The same for every recipe."""
    recipes = dict.fromkeys(recipe for _, _, recipe, _ in pairs(found))
    counted = Counter((recipe, outcome.kind) for _, _, recipe, outcome in pairs(found))
    return {recipe: {kind: counted[recipe, kind] for kind in OUTCOMES} for recipe in recipes}


def by_reason(found: Found) -> str:
    """How many refusals each reason has, the most frequent first."""
    counted = Counter(outcome.reason for *_, outcome in pairs(found) if outcome.kind == REFUSED)
    return "\n".join(f"{number:5} {reason}" for reason, number in counted.most_common())


def oddities(found: Found) -> list[str]:
    """Pairs that act although something does not fit."""
    return [
        f"{library} {model}, {recipe}: {outcome.reason} {outcome.message}".rstrip()
        for library, model, recipe, outcome in pairs(found)
        if outcome.kind == ACTS and outcome.reason
    ]


# ------------------------------------------------------------------------------------------------------------ Markdown
def markdown(found: Found) -> str:
    """A table: on how many models of each library a recipe acts, and how the other pairs ended."""
    head = ["recipe", *(f"{library} ({len(models)})" for library, models in found.items()), REFUSED, NO_OP, CRASH]
    rows: list[list[object]] = [
        [f"`{recipe}`", *(acting(models, recipe) for models in found.values()), *(all_of[k] for k in OUTCOMES[1:])]
        for recipe, all_of in by_recipe(found).items()
    ]
    sums = [sum(acting(models, recipe) for recipe in by_recipe(found)) for models in found.values()]
    rows.append(["all", *sums, *(counts(found)[kind] for kind in OUTCOMES[1:])])
    lines: list[list[object]] = [[*head], ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def acting(models: Mapping[str, Mapping[str, Outcome]], recipe: str) -> int:
    """On how many of these models a recipe acts."""
    return sum(row[recipe].kind == ACTS for row in models.values() if recipe in row)


def listing(found: Found) -> str:
    """Every crash and no-op, what is odd, and the models of every recipe and reason, as Markdown."""
    total = ", ".join(f"{kind} {number}" for kind, number in counts(found).items())
    parts = ["# The sweep, pair by pair", "", total, "", markdown(found), "", "```text", by_reason(found), "```"]
    for kind, title in ((CRASH, "Crashes"), (NO_OP, "No-ops")):
        parts += ["", f"## {title}"]
        for library, model, recipe, outcome in pairs(found):
            if outcome.kind == kind:
                parts += ["", f"### {library} {model}, {recipe}: {outcome.reason} ({outcome.stage})"]
                parts += ["```text", outcome.message.strip()[-3000:], "```"]
    parts += ["", "## Acts, but something does not fit", "", *(f"- {line}" for line in oddities(found))]
    parts += [
        "",
        "## Refused",
        "",
        "An asterisk marks what only the first pass refused; the rest was refused by `apply`.",
    ]
    for recipe, reasons in refusals(found).items():
        parts += ["", f"### {recipe} ({sum(map(len, reasons.values()))})"]
        for reason, refused in sorted(reasons.items(), key=lambda item: -len(item[1])):
            parts += ["", f"**{reason}** ({len(refused)})", ""]
            for library in found:
                names = [
                    name + ("*" if o.stage == "training" else "") for where, name, o in refused if where == library
                ]
                parts += [f"- {library}: {', '.join(names)}"] if names else []
            parts += ["", f"> {refused[0][1]}: {refused[0][2].message}"]
    return "\n".join(parts)


def refusals(found: Found) -> dict[str, dict[str, list[tuple[str, str, Outcome]]]]:
    """Recipe → reason → (library, model, outcome)."""
    groups: dict[str, dict[str, list[tuple[str, str, Outcome]]]] = {}
    for library, model, recipe, outcome in pairs(found):
        if outcome.kind == REFUSED:
            groups.setdefault(recipe, {}).setdefault(outcome.reason, []).append((library, model, outcome))
    return {recipe: groups[recipe] for recipe in by_recipe(found) if recipe in groups}


# ---------------------------------------------------------------------------------------------------------- two sweeps
def difference(old: Found, new: Found) -> str:
    """Counts before and after over the pairs that both have, and every pair that acted before and does not now."""
    before = {(library, model, recipe): outcome for library, model, recipe, outcome in pairs(old)}
    after = {(library, model, recipe): outcome for library, model, recipe, outcome in pairs(new)}
    shared = [pair for pair in after if pair in before]
    lines = [
        f"{len(shared)} pairs in both, {len(before) - len(shared)} only before, {len(after) - len(shared)} only now"
    ]
    for name in ("all", *by_recipe(new)):
        chosen = [pair for pair in shared if name in ("all", pair[2])]
        changes = [f"{kind} {_count(before, chosen, kind)} → {_count(after, chosen, kind)}" for kind in OUTCOMES]
        lines.append(f"{name:15} {', '.join(changes)}")
    lost = [pair for pair in shared if before[pair].kind == ACTS and after[pair].kind != ACTS]
    lines += [f"acted before, {after[pair].kind} now: {', '.join(pair)} ({after[pair].reason})" for pair in lost]
    return "\n".join(lines)


def _count(outcomes: Mapping[tuple[str, str, str], Outcome], chosen: list[tuple[str, str, str]], kind: str) -> int:
    return sum(outcomes[pair].kind == kind for pair in chosen)
