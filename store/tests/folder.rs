//! Stores in folders: one process at a time, readable by the owner alone.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use store::{FILE, Kind, Limits, Store, StoreError, created_at, fresh_id};

use crate::common::{insert, owner};

#[test]
fn a_folder_is_locked_while_a_store_has_it_open_and_keeps_its_records() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b");
    let store = Store::open(&path, Limits::default()).unwrap();
    assert!(!store.was_repaired(), "a new folder");
    let second = Store::open(&path, Limits::default()).map(drop).unwrap_err();
    assert!(matches!(second, StoreError::Locked), "{second}");
    store.apply_blocking(vec![insert("one", Kind::File, false, b"1")]).unwrap();
    let secret = *store.secret();
    store.close();
    assert!(matches!(store.get("one"), Err(StoreError::Closed)));
    assert!(matches!(store.apply_blocking(Vec::new()), Err(StoreError::Closed)));
    let again = Store::open(&path, Limits::default()).unwrap();
    assert_eq!(again.get("one").unwrap().unwrap().owner, owner(1));
    assert_eq!((again.secret(), again.was_repaired()), (&secret, false));
    assert_ne!(Store::in_memory(Limits::default()).unwrap().secret(), &secret);
}

#[test]
fn only_the_owner_can_read_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    std::fs::create_dir(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    drop(Store::open(&path, Limits::default()).unwrap());
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&path.join(FILE))), (0o700, 0o600));
}

#[test]
fn a_folder_that_cannot_be_used_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, b"x").unwrap();
    let error = Store::open(&path, Limits::default()).map(drop).unwrap_err();
    assert!(error.to_string().starts_with(&path.display().to_string()), "{error}");
    // A file that is no store is not overwritten.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(FILE), [7; 9000]).unwrap();
    assert!(Store::open(folder.path(), Limits::default()).is_err());
    assert_eq!(std::fs::read(folder.path().join(FILE)).unwrap(), [7; 9000]);
}

#[test]
fn ids_are_random_and_tell_their_time() {
    let ids: std::collections::HashSet<String> = (0..1000).map(|_| fresh_id("resp", 1_800_000_000).unwrap()).collect();
    assert_eq!(ids.len(), 1000);
    assert!(ids.iter().all(|id| id.starts_with("resp_") && created_at(id) == Some(1_800_000_000)));
    for other in ["", "resp_1", "resp_zz", "resp", &"0".repeat(41)] {
        assert_eq!(created_at(other), None, "{other}");
    }
}

#[test]
fn a_store_closes_with_its_last_handle() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path(), Limits { ttl: Duration::from_secs(5), ..Limits::default() }).unwrap();
    let other = store.clone();
    drop(store);
    other.apply_blocking(vec![insert("one", Kind::File, false, b"1")]).unwrap();
    drop(other);
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while let Err(error) = Store::open(folder.path(), Limits::default()) {
        assert!(matches!(error, StoreError::Locked) && std::time::Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
