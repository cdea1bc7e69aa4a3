"""`hf:NAME`: a data set of the Hugging Face hub, or one in a local folder, streamed or prepared on disk."""

from pathlib import Path
from typing import Any

from attemper.errors import ParameterError, suggestion
from attemper.lab.errors import DataError
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.streaming.arrow import ArrowStore
from attemper.lab.tasks.streaming.rowgroups import RowGroupStore, open_row_groups
from attemper.lab.tasks.streaming.task import StreamTask, need, open_parts

TEST_PARTS = ("test", "validation", "val")


def open_hf(
    name: str,
    path: str,
    root: Path,
    *,
    size: int = 224,
    crop: float = 0.875,
    classes: int | None = None,
    config: str | None = None,
    training: str = "train",
    held_out: str | None = None,
    image: str = "image",
    label: str = "label",
    streaming: bool = True,
    train: int | None = None,
    test: int | None = None,
) -> StreamTask:
    """The images of a Hugging Face data set.

    path: its name on the hub, or a folder with its files under the data root or from where the program runs.
    size: side of the images in pixels. crop: share of the shorter side that the middle square keeps in evaluation.
    classes: how many there are; none: what the data set says, else up to the largest that occurs.
    config: which of several configurations of the data set.
    training, held_out: its splits; held_out none: test, validation or val.
    image, label: its columns.
    streaming: read parquet files where they lie. Otherwise the data set is prepared in the cache of Hugging Face's
        library, where any sample can be read; that takes disk space, and works with all kinds of files.
    """
    need("Hugging Face data sets", "datasets")
    folder = next((each for each in (root / path, Path(path)) if each.is_dir()), None)
    place = path if folder is None else str(folder.absolute())
    builder = _builder(place, config)
    splits = list(map(str, builder.config.data_files or builder.info.splits or ()))
    wanted = TEST_PARTS if held_out is None else (held_out,)
    parts = [_choose(splits, path, "training", (training,)), _choose(splits, path, "held_out", wanted)]
    if parts[0] == parts[1]:
        raise DataError(
            f"'{name}' would train and test on the same split, '{parts[0]}'; choose with the option held_out."
        )
    stores: list[RowGroupStore] | list[ArrowStore]
    if streaming:
        stores = [open_row_groups(_parquet_files(builder, part, path), image, label, root) for part in parts]
    elif config is not None:
        raise ParameterError(f"'{name}': config is {config!r}; it can be chosen with streaming=true only.")
    else:
        stores = [ArrowStore(place, part, image, label) for part in parts]
    names = _class_names(stores, classes, label, path)
    for store in stores:
        store.check_classes(len(names))
    return open_parts(
        name,
        (stores[0], stores[0].selection),
        (stores[1], stores[1].selection),
        size=size,
        crop=crop,
        classes=names,
        fingerprint=of_parts("hf", *(store.fingerprint for store in stores)),
        train=train,
        test=test,
    )


def _builder(place: str, config: str | None) -> Any:
    from datasets import load_dataset_builder  # type: ignore[import-untyped]

    try:
        return load_dataset_builder(place, config)
    except Exception as error:  # many kinds, of files, of names and of networks
        raise DataError(
            f"Hugging Face's library cannot open '{place}'"
            f"{'' if config is None else f' with the configuration {config!r}'}: {type(error).__name__}: {error}"
        ) from error


def _choose(splits: list[str], path: str, option: str, wanted: tuple[str, ...]) -> str:
    """The first of the wanted splits that is there."""
    for each in wanted:
        if each in splits:
            return each
    asked = " or ".join(f"'{each}'" for each in wanted)
    raise DataError(
        f"'{path}' has no split {asked}.{suggestion(wanted[0], splits)} It has: {', '.join(splits) or 'none'}; choose "
        f"with the option {option}."
    )


def _parquet_files(builder: Any, split: str, path: str) -> list[str]:
    files = [str(each) for each in (builder.config.data_files or {}).get(split, ())]
    other = next((each for each in files if not each.endswith(".parquet")), None)
    if not files or other is not None:
        what = "has no parquet files" if other is None else f"has other files than parquet, such as '{other}'"
        raise DataError(
            f"The split '{split}' of '{path}' {what}, and only those can be streamed from any position. With "
            "streaming=false it is prepared on disk."
        )
    return files


def _class_names(
    stores: list[RowGroupStore] | list[ArrowStore], classes: int | None, label: str, path: str
) -> tuple[str, ...]:
    """The names of the classes; their numbers, where the data set has no names."""
    names = stores[0].class_names
    for store in stores[1:]:
        if store.class_names != names:
            raise DataError(f"The splits of '{path}' have different classes in '{label}'.")
    if names is not None and classes not in (None, len(names)):
        raise DataError(f"'{path}' has {len(names)} classes in '{label}', and the option classes says {classes}.")
    if names is None:
        count = classes
        if count is None:
            count = 1 + max(int(store.labels().max()) for store in stores)
        names = tuple(map(str, range(count)))
    if len(names) < 2:
        raise DataError(f"'{path}' has {len(names)} classes in '{label}'; there must be at least 2.")
    return names
