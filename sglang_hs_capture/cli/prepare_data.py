"""``hs-capture prepare-data``: conversations in, a tokenised set out, and a look at its loss masks."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sglang_hs_capture.cli import options
from sglang_hs_capture.cli.check_view import make_check_view
from sglang_hs_capture.cli.mask_view import Decode, print_samples
from sglang_hs_capture.driver.check import find_model
from sglang_hs_capture.driver.intake import OnBadInput
from sglang_hs_capture.driver.make_set import SetSettings, make_set
from sglang_hs_capture.driver.source import count_samples

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
    preparer = source.preparer(config.media_token if config else None)
    items = source.samples(
        max_length=config.context_length if config else None,
        vocab_size=config.vocab_size if config else None,
        preparer=preparer,
    )
    # pyarrow takes a fifth of a second to import, which every command would wait for.
    from sglang_hs_capture.data.prepared import PreparedSet, describe_tokenizer

    with PreparedSet(out.expanduser()) as prepared:
        with make_check_view() as view:
            view.begin("tokenising", options.total_of(count_samples(data), limit), "samples")
            account = make_set(items, prepared, SetSettings(on_bad_input, limit, show), view.advance)
        used = preparer.loaded.tokenizer if preparer.loaded else None
        prepared.finish(
            {
                "tokenizer": source.tokenizer or None,
                **describe_tokenizer(used),
                **source.preparation.to_json(),
                "shuffle_seed": given.shuffle_seed,
                **account.to_json(),
            }
        )
    if account.shown:
        print_samples(Console(), account.shown, _decoder(used or source.load_tokenizer()))
    for line in account.lines():
        typer.echo(line)
    typer.echo(f"Tokenised set: {prepared.out}")


def _decoder(tokenizer: Any) -> Decode:
    """The text of tokens, control tokens included; their ids where there is no tokenizer."""
    if tokenizer is None:
        return lambda tokens: " ".join(map(str, tokens)) + " "
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
