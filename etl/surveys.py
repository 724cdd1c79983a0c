"""RunConfig -> Survey: what INPUT, OUTPUT and the tokenizer are, and what is left to do; nothing is written here."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from etl import ledger
from etl.config import RunConfig
from etl.errors import StorageError, UsageError
from etl.fingerprint import difference, digest, settings
from etl.ledger import Places, Plan
from etl.partitions import Listing, check_apart, cut_partitions, find_objects
from etl.records import Partition, TokenizerSpec
from etl.schema import check_names
from etl.storage import Storage, canonical_url
from etl.template import ChatTemplate, probe
from etl.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Survey:
    """All that is known before anything is written: what would be read, how it is cut, what is done."""

    config: RunConfig
    places: Places
    storage: Storage
    spec: TokenizerSpec
    plan: Plan
    before: Plan | None
    receipts: Mapping[str, Mapping[str, Any]]
    listing: Listing
    notes: tuple[str, ...]
    finished: bool

    @property
    def changed(self) -> bool:
        """Whether OUTPUT's plan is not the one to go by: new, grown, or another's place taken."""
        return self.before is None or self.plan.partitions != self.before.partitions or bool(self.plan.discards)

    @property
    def todo(self) -> tuple[Partition, ...]:
        """Partitions without a valid receipt, in order."""
        return tuple(p for p in self.plan.partitions if p.stem not in self.receipts)


def survey(config: RunConfig) -> Survey:
    """Look at input, output and tokenizer; write nothing. Raises UsageError on whatever forbids a run."""
    if config.output is None:
        raise UsageError("name an OUTPUT, e.g. s3://bucket/tokens/")
    try:
        return _survey(config, config.output)
    except StorageError as error:
        raise UsageError(str(error)) from error


def _survey(config: RunConfig, output: str) -> Survey:
    check_apart(config.inputs, output)
    check_names(config.keep_fields)
    storage, places = Storage.from_config(config), Places(canonical_url(output))
    storage.check_writable(places.root)
    old = ledger.read_plan(storage, places)
    if old is None:
        _check_foreign(storage, places, ())
    listing = find_objects(storage, config.inputs, config.partition_size)
    spec = load_tokenizer(config)
    notes = probe(ChatTemplate.from_spec(spec, config))
    plan = _plan(old, listing, config, settings(spec, config), spec.largest_id())
    if old is not None and plan.discards:
        _check_foreign(storage, places, ledger.names_of(places, old))
    receipts = {} if old is None else ledger.read_receipts(storage, places, plan)
    finished = old is not None and ledger.is_finished(storage, places, old)
    return Survey(config, places, storage, spec, plan, old, receipts, listing, tuple(notes), finished=finished)


def look_at_input(config: RunConfig) -> tuple[TokenizerSpec, tuple[Partition, ...]]:
    """INPUT, the tokenizer and the partitions of a run that has no OUTPUT. Raises UsageError as `survey` does."""
    check_names(config.keep_fields)
    try:
        listing = find_objects(Storage.from_config(config), config.inputs, config.partition_size)
    except StorageError as error:
        raise UsageError(str(error)) from error
    spec = load_tokenizer(config)
    probe(ChatTemplate.from_spec(spec, config))
    fingerprint = digest(settings(spec, config))
    return spec, cut_partitions(listing.objects, config.partition_size, fingerprint, listing.compressed)


def _check_foreign(storage: Storage, places: Places, ours: Collection[str]) -> None:
    """Raise UsageError where OUTPUT holds an object that neither `ours` names nor a killed run may have left."""
    held = [o.url for o in storage.list(places.root) if o.url not in ours and not places.is_passing(o.url)]
    if held:
        raise UsageError(
            f"OUTPUT {places.root} already holds {len(held)} objects that etl did not plan, e.g. {held[0]}; "
            "move them, or choose an empty place"
        )


def _plan(old: Plan | None, listing: Listing, config: RunConfig, values: Mapping[str, Any], largest_id: int) -> Plan:
    """The plan to go by: a new one, the old one with new objects appended, or under --overwrite one in its place."""
    if old is None:
        return _new_plan(listing, config, values, largest_id)
    changed = _difference(old, listing, values)
    if changed is None:
        fresh = [o for o in listing.objects if o.url not in _planned(old)]
        partitions = cut_partitions(fresh, config.partition_size, old.fingerprint, listing.compressed, old.partitions)
        inputs = tuple(dict.fromkeys((*old.inputs, *config.inputs))) if fresh else old.inputs
        return dataclasses.replace(old, partitions=partitions, inputs=inputs, passed_over=listing.passed_over)
    if not config.overwrite:
        raise UsageError(f"OUTPUT {config.output} {changed}, or give --overwrite to write it anew")
    new = _new_plan(listing, config, values, largest_id)
    kept = {p.stem for p in new.partitions}
    stems = [*(p.stem for p in old.partitions), *old.discards]
    return dataclasses.replace(new, discards=tuple(stem for stem in stems if stem not in kept))


def _new_plan(listing: Listing, config: RunConfig, values: Mapping[str, Any], largest_id: int) -> Plan:
    fingerprint = digest(values)
    partitions = cut_partitions(listing.objects, config.partition_size, fingerprint, listing.compressed)
    return Plan(fingerprint, values, config.inputs, partitions, listing.passed_over, largest_id)


def _difference(old: Plan, listing: Listing, values: Mapping[str, Any]) -> str | None:
    """What is not as it was when OUTPUT was planned (was, is) and what to do, or None."""
    if digest(values) != old.fingerprint:
        named = difference(old.settings, values)
        return f"was written with other options: {named}; use the same ones, another OUTPUT"
    found = {o.url: (o.etag, o.size) for o in listing.objects}
    for url, was in _planned(old).items():
        now = found.get(url)
        if now is None:
            return f"was planned with {url}, which is gone; restore it, use another OUTPUT"
        if now != was:
            return f"was planned with another {url} (ETag was {was[0]}, is {now[0]}); restore it, use another OUTPUT"
    return None


def _planned(plan: Plan) -> dict[str, tuple[str, int]]:
    return {r.url: (r.etag, r.size) for p in plan.partitions for r in p.ranges}
