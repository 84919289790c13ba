//! A map from two names to a value that only grows, and that is read without a lock: kernels by module and name.
//!
//! Each bucket is a chain of entries, and each link is set once. So an entry never moves and lives as long as the map. Reading
//! costs a hash and the comparison of the names in a chain.

use std::hash::{DefaultHasher, Hasher};
use std::sync::OnceLock;

/// Number of chains: several for each kernel that a model launches.
const BUCKETS: usize = 512;

pub(crate) struct AppendMap<T>(Box<[Link<T>]>);

type Link<T> = OnceLock<Box<Entry<T>>>;

struct Entry<T> {
    names: [String; 2],
    value: T,
    next: Link<T>,
}

impl<T> AppendMap<T> {
    pub fn new() -> AppendMap<T> {
        AppendMap((0..BUCKETS).map(|_| OnceLock::new()).collect())
    }

    pub fn get(&self, names: [&str; 2]) -> Option<&T> {
        let mut link = self.bucket(names);
        while let Some(entry) = link.get() {
            if entry.names == names {
                return Some(&entry.value);
            }
            link = &entry.next;
        }
        None
    }

    /// Returns the value of these names: the one that the map has, or else this one, which it adds.
    pub fn get_or_add(&self, names: [&str; 2], value: T) -> &T {
        let mut new = Some(Box::new(Entry { names: names.map(str::to_owned), value, next: OnceLock::new() }));
        let mut link = self.bucket(names);
        loop {
            match link.get() {
                Some(entry) if entry.names == names => return &entry.value,
                Some(entry) => link = &entry.next,
                // If another thread is faster, its entry is met next.
                None => new = new.and_then(|new| link.set(new).err()),
            }
        }
    }

    fn bucket(&self, names: [&str; 2]) -> &Link<T> {
        let mut hasher = DefaultHasher::new();
        names.iter().for_each(|name| hasher.write(name.as_bytes()));
        &self.0[hasher.finish() as usize % BUCKETS]
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_threads_add_at_once_is_found_and_the_first_value_of_a_name_stays() {
        let map = AppendMap::new();
        // More names than buckets.
        let names: Vec<String> = (0..3 * BUCKETS).map(|i| format!("kernel_{i}")).collect();
        assert!(map.get(["module", "kernel_0"]).is_none());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (map, names) = (&map, &names);
                scope.spawn(move || {
                    for name in names {
                        let found = *map.get_or_add(["module", name], thread);
                        assert_eq!(map.get(["module", name]), Some(&found));
                    }
                });
            }
        });
        let before: Vec<i32> = names.iter().map(|name| *map.get(["module", name]).unwrap()).collect();
        for name in &names {
            assert!((0..4).contains(map.get_or_add(["module", name], 9)));
            assert_eq!(*map.get_or_add(["other", name], 9), 9);
        }
        assert!(names.iter().zip(before).all(|(name, value)| map.get(["module", name]) == Some(&value)));
        // Some are in a chain with the same kernel of another module.
        assert!(names.iter().all(|name| map.get(["third", name]).is_none() && map.get(["", name]).is_none()));
    }
}
