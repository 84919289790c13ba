//! Covering arrays: few combinations of settings such that every combination of any two (or three) of them occurs.

use std::collections::HashSet;

use trial::numbers::Random;

/// Returns rows of one index below each of `sizes`, such that any `strength` columns contain every combination of their
/// values. Greedy, as in AETG (Cohen et al., 1997): each row starts from a missing combination and is the best of several
/// completions.
pub fn rows(sizes: &[usize], strength: usize, seed: u64) -> Vec<Vec<usize>> {
    let columns = subsets(sizes.len(), strength);
    let mut missing: Vec<HashSet<Vec<usize>>> = columns.iter().map(|columns| combinations(sizes, columns)).collect();
    let mut random = Random::new(seed);
    let mut rows = Vec::new();
    while let Some(which) = missing.iter().position(|missing| !missing.is_empty()) {
        let mut start: Vec<&Vec<usize>> = missing[which].iter().collect();
        start.sort();
        let start = start[random.below(start.len())].clone();
        let complete = |random: &mut Random| -> Vec<usize> {
            let mut row: Vec<usize> = sizes.iter().map(|&size| random.below(size)).collect();
            for (&column, &value) in columns[which].iter().zip(&start) {
                row[column] = value;
            }
            row
        };
        let gain = |row: &Vec<usize>| {
            let new =
                columns.iter().zip(&missing).filter(|(columns, missing)| missing.contains(&project(row, columns)));
            new.count()
        };
        let row = (0..20).map(|_| complete(&mut random)).max_by_key(gain).unwrap();
        for (columns, missing) in columns.iter().zip(&mut missing) {
            missing.remove(&project(&row, columns));
        }
        rows.push(row);
    }
    rows
}

fn project(row: &[usize], columns: &[usize]) -> Vec<usize> {
    columns.iter().map(|&column| row[column]).collect()
}

fn combinations(sizes: &[usize], columns: &[usize]) -> HashSet<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for &column in columns {
        all = all.iter().flat_map(|c: &Vec<usize>| (0..sizes[column]).map(|v| [&c[..], &[v]].concat())).collect();
    }
    all.into_iter().collect()
}

fn subsets(n: usize, k: usize) -> Vec<Vec<usize>> {
    if k == 0 {
        return vec![Vec::new()];
    }
    let with = |last: usize| {
        subsets(last, k - 1).into_iter().map(move |mut subset| {
            subset.push(last);
            subset
        })
    };
    (0..n).flat_map(with).collect()
}

#[test]
fn every_pair_and_every_triple_occurs() {
    let sizes = [3, 4, 2, 8, 1];
    for strength in [2, 3] {
        let rows = rows(&sizes, strength, 1);
        for columns in subsets(sizes.len(), strength) {
            let seen: HashSet<Vec<usize>> = rows.iter().map(|row| project(row, &columns)).collect();
            assert_eq!(seen, combinations(&sizes, &columns));
        }
        assert!(rows.len() < 192, "fewer than all of them: {}", rows.len());
    }
}
