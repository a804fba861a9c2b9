"""``hs-capture prepare-data``: conversations in, a tokenised set out, and a look at its loss masks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sglang_hs_capture.cli import options
from sglang_hs_capture.cli.check_view import make_check_view
from sglang_hs_capture.cli.mask_view import Decode, print_samples
from sglang_hs_capture.cli.tell import tell
from sglang_hs_capture.driver.check import find_model
from sglang_hs_capture.driver.intake import OnBadInput
from sglang_hs_capture.driver.make_set import SetSettings, make_set
from sglang_hs_capture.driver.source import TOKENIZED_BY, Source, count_samples
from sglang_hs_capture.errors import InputError

DEFAULT_SHOWN = 3


@options.with_options(given=options.InputOptions)
def prepare_data(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist, or be empty.")],
    *,
    data: options.DataOption,
    model: Annotated[
        str | None,
        typer.Option(help="The model that is to be captured: its tokenizer, its context and its vocabulary."),
    ] = None,
    given: options.InputOptions,
    on_bad_input: options.OnBadInputOption = OnBadInput.STOP,
    limit: options.LimitOption = None,
    show: Annotated[int, typer.Option(min=0, help="Show so many samples with their loss mask.")] = DEFAULT_SHOWN,
) -> None:
    """Tokenise conversations, and show what is trained on.

    Every line is looked at, and no engine is started. The folder holds Parquet files that run takes as --data.
    """
    if given.max_length is None:
        options.refuse_given(ctx, ("overflow",), options.OVERFLOW_ALONE)
    config = find_model(model) if model else None
    source = given.source(data, model, share=1)
    for notice in source.check_sets():
        tell(notice, err=True)
    preparer = source.preparer(config.media_token if config else None)
    items = source.samples(
        max_length=config.context_length if config else None,
        vocab_size=config.vocab_size if config else None,
        preparer=preparer,
    )
    # pyarrow takes a fifth of a second to import, which every command would wait for.
    from sglang_hs_capture.data.prepared import PreparedSet

    with PreparedSet(out.expanduser()) as prepared:
        with make_check_view() as view:
            view.begin("tokenising", options.total_of(count_samples(data), limit), "samples")
            account = make_set(items, prepared, SetSettings(on_bad_input, limit, show), view.advance)
        used = preparer.loaded.tokenizer if preparer.loaded else None
        prepared.finish(
            {
                **_tokenized_by(source, used),
                **source.preparation.to_json(),
                "shuffle_seed": given.shuffle_seed,
                **account.to_json(),
            }
        )
    if account.shown:
        print_samples(Console(), account.shown, _decoder(used or _loaded(source)))
    for line in account.lines():
        tell(line)
    tell(f"Tokenised set: {prepared.out}")


def _tokenized_by(source: Source, used: Any) -> dict[str, Any]:
    """What tokenised the rows: the tokenizer that was used here, or the one of the sets that the rows come from."""
    from sglang_hs_capture.data.prepared import describe_tokenizer

    sets = source.tokenized_sets()
    if used is None and sets:
        return {key: next(iter(sets.values())).get(key) for key in TOKENIZED_BY}
    return {"tokenizer": source.tokenizer or None, **describe_tokenizer(used)}


def _loaded(source: Source) -> Any:
    """The tokenizer, to show rows that needed none; None where it cannot be loaded."""
    try:
        return source.load_tokenizer()
    except InputError as error:
        tell(f"Samples are shown by their token ids: {error}", err=True)
        return None


def _decoder(tokenizer: Any) -> Decode:
    """The text of tokens, control tokens included; their ids where there is no tokenizer, or it has no such tokens."""

    def decode(tokens: Sequence[int]) -> str:
        if tokenizer is None or max(tokens, default=0) >= len(tokenizer):
            return " ".join(map(str, tokens)) + " "
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode
