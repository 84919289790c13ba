//! Any history of changes leaves what a naive model has.

use std::collections::BTreeMap;

use proptest::prelude::*;
use store::{Change, Kind, Limits, NewRecord, Page, Store, StoreError};

use crate::common::owner;

/// A record of the model: kind, owner, open, body, serial, parts.
type Kept = (Kind, u8, bool, Vec<u8>, usize, BTreeMap<(u8, u64), Vec<u8>>);

#[derive(Clone, Default)]
struct Model {
    records: BTreeMap<String, Kept>,
    serial: usize,
}

impl Model {
    fn apply(&mut self, changes: &[Change]) -> Result<(), &'static str> {
        let mut next = self.clone();
        changes.iter().try_for_each(|change| next.make(change))?;
        *self = next;
        Ok(())
    }

    fn make(&mut self, change: &Change) -> Result<(), &'static str> {
        if let Change::Insert { id, record } = change {
            if self.records.contains_key(id) {
                return Err("exists");
            }
            let kept =
                (record.kind, record.owner[0], record.is_open, record.body.clone(), self.serial, BTreeMap::new());
            self.serial += 1;
            self.records.insert(id.clone(), kept);
            return Ok(());
        }
        let kept = self.records.get_mut(change.id()).ok_or("missing")?;
        match change {
            Change::Update { .. } if !kept.2 => return Err("ended"),
            Change::Update { body, is_open, .. } => (kept.3, kept.2) = (body.clone(), *is_open),
            Change::Replace { body, .. } => kept.3 = body.clone(),
            Change::Part { list, number, bytes, .. } => drop(kept.5.insert((*list, *number), bytes.clone())),
            Change::RemovePart { list, number, .. } => drop(kept.5.remove(&(*list, *number))),
            Change::Delete { id } => drop(self.records.remove(id)),
            Change::Insert { .. } | Change::Expire { .. } => {}
        }
        Ok(())
    }
}

fn change() -> impl Strategy<Value = Change> {
    let id = || (0..6_u8).prop_map(|n| format!("id{n}"));
    let body = || prop_oneof![4 => 0..40_usize, 1 => 0..6000_usize].prop_map(|len| vec![len as u8; len]);
    let kind = prop::sample::select(Kind::ALL.to_vec());
    prop_oneof![
        4 => (id(), kind, 0..3_u8, any::<bool>(), 0..5000_u64, body()).prop_map(|(id, kind, name, is_open, reserved, body)| {
            Change::Insert { id, record: NewRecord { kind, owner: owner(name), is_open, reserved, ttl: None, body } }
        }),
        2 => (id(), body(), any::<bool>()).prop_map(|(id, body, is_open)| Change::Update { id, body, is_open }),
        1 => (id(), body()).prop_map(|(id, body)| Change::Replace { id, body }),
        4 => (id(), 0..2_u8, 0..4_u64, body()).prop_map(|(id, list, number, bytes)| Change::Part { id, list, number, bytes }),
        1 => (id(), 0..2_u8, 0..4_u64).prop_map(|(id, list, number)| Change::RemovePart { id, list, number }),
        1 => id().prop_map(|id| Change::Expire { id, after: std::time::Duration::from_secs(9000) }),
        1 => id().prop_map(|id| Change::Delete { id }),
    ]
}

fn check(store: &Store, model: &Model) {
    for n in 0..6 {
        let id = format!("id{n}");
        let (found, kept) = (store.get(&id).unwrap(), model.records.get(&id));
        assert_eq!(found.is_some(), kept.is_some(), "{id}");
        let Some((record, kept)) = found.zip(kept) else { continue };
        assert_eq!((record.kind, record.owner[0], record.is_open, &record.body), (kept.0, kept.1, kept.2, &kept.3));
        for list in 0..2 {
            let parts = store.parts(&id, list, 1, usize::MAX).unwrap();
            let expected: Vec<(u64, Vec<u8>)> =
                kept.5.range((list, 1)..=(list, 9)).map(|((_, number), bytes)| (*number, bytes.clone())).collect();
            assert_eq!(parts, expected);
            assert_eq!(store.part_numbers(&id, list).unwrap().len(), kept.5.range((list, 0)..=(list, 9)).count());
        }
    }
    for kind in Kind::ALL {
        for name in 0..3 {
            let mut expected: Vec<(&String, usize)> = model
                .records
                .iter()
                .filter(|(_, kept)| kept.0 == kind && kept.1 == name)
                .map(|(id, kept)| (id, kept.4))
                .collect();
            expected.sort_by_key(|(_, serial)| *serial);
            for newest_first in [false, true] {
                // In pages of two.
                let (mut found, mut after, mut more) = (Vec::new(), None::<String>, true);
                while more {
                    let page = Page { after: after.as_deref(), limit: 2, newest_first, keep: &|_| true };
                    let (records, rest) = store.list(kind, &owner(name), &page).unwrap();
                    assert!(!rest || records.len() == 2);
                    found.extend(records.into_iter().map(|(id, _)| id));
                    (after, more) = (found.last().cloned(), rest);
                }
                let ids: Vec<&String> = expected.iter().map(|(id, _)| *id).collect();
                if newest_first {
                    found.reverse()
                }
                assert_eq!(found.iter().collect::<Vec<_>>(), ids);
            }
        }
    }
    let mut open: Vec<(usize, &String)> =
        model.records.iter().filter(|(_, kept)| kept.2).map(|(id, kept)| (kept.4, id)).collect();
    open.sort();
    let unfinished = store.unfinished().unwrap();
    assert_eq!(
        unfinished.iter().map(|(id, _)| id).collect::<Vec<_>>(),
        open.iter().map(|(_, id)| *id).collect::<Vec<_>>()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_store_is_what_a_naive_model_of_its_changes_is(lists in prop::collection::vec(prop::collection::vec(change(), 1..4), 1..24)) {
        let (store, mut model) = (Store::in_memory(Limits::default()).unwrap(), Model::default());
        for list in &lists {
            let expected = model.apply(list);
            let found = store.apply_blocking(list.clone()).map_err(|error| match error {
                StoreError::Exists(_) => "exists",
                StoreError::Missing(_) => "missing",
                StoreError::Ended(_) => "ended",
                other => panic!("{other}"),
            });
            prop_assert_eq!(found, expected);
        }
        check(&store, &model);
        // Nothing is left of what is removed.
        for id in model.records.keys() {
            store.apply_blocking(vec![Change::Delete { id: id.clone() }]).unwrap();
        }
        let stats = store.stats();
        prop_assert_eq!((stats.bytes, stats.reserved, stats.records), (0, 0, [0; 4]));
    }
}
