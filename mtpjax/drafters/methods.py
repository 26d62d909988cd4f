"""All draft methods, and their lookup by name or drafter."""

from mtpjax.decoding.decoder import Drafter
from mtpjax.drafters.dflash.method import DFLASH
from mtpjax.drafters.dspark.method import DSPARK
from mtpjax.drafters.eagle3.method import EAGLE3
from mtpjax.drafters.lookup.method import LOOKUP
from mtpjax.drafters.medusa.method import MEDUSA
from mtpjax.drafters.method import DraftMethod
from mtpjax.drafters.mtp.method import MTP
from mtpjax.errors import UsageError, printable
from mtpjax.messages import did_you_mean
from mtpjax.records import import_record

METHODS: tuple[DraftMethod, ...] = (MTP, LOOKUP, EAGLE3, MEDUSA, DFLASH, DSPARK)


def find_method(name: str) -> DraftMethod:
    """Finds a method by its name, or a user-defined one by `package.module:RECORD`.

    Raises:
        UsageError: there is no such method, or the user's module or record cannot be imported.
    """
    if ":" in name:
        return import_record(name, DraftMethod)
    known = {method.name: method for method in METHODS}
    if name not in known:
        raise UsageError(
            f"drafter must be one of {', '.join(known)}, or package.module:RECORD, got {printable(name, 60)}"
            f"{did_you_mean(name, known)}"
        )
    return known[name]


def method_of(drafter: str | Drafter) -> DraftMethod | None:
    """Returns the method of `DecodeConfig.drafter`; None for a user-defined drafter."""
    if isinstance(drafter, str):
        return find_method(drafter)
    return next((method for method in METHODS if method.drafter is type(drafter)), None)


def uses_mtp_modules(drafter: str | Drafter) -> bool:
    """Returns whether `DecodeConfig.drafter` drafts with the model's own MTP modules."""
    method = method_of(drafter)
    return method is not None and method.is_of_model
