//! Random histories against a naive model *and* real contents.
//!
//! The test owns an array per physical block. A "key" written to a slot is a hash of everything the real one
//! would depend on: salt, all tokens up to it. Every copy and poison that the pool orders is applied in
//! order, every computed token is written to its slot, and after each operation every live sequence is read
//! back through its table. So a block that is shared wrongly, reissued too early, copied too late or found
//! under another prompt's prefix shows as wrong contents.
//!
//! The naive model knows which prefix each cached block holds and predicts hits, needs and refusals without
//! hashes or lists.
#![allow(clippy::unwrap_used)]

mod naive;

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use kvblock::{BlockId, BlockPool, BlockTable, MemOp, MissReason, NoSpace, PoolConfig, Prompt};
use naive::NaiveCache;
use proptest::prelude::*;

/// One step of a history. Numbers select modulo what is there.
#[derive(Clone, Debug)]
enum Op {
    Open { tokens: Vec<u32>, salt: usize, read_cache: bool, keep_free: usize },
    Append { at: usize, tokens: Vec<u32> },
    Compute { at: usize, count: usize },
    Fork { at: usize },
    Truncate { at: usize, len: usize },
    Release { at: usize },
    Reset,
}

/// Few tokens and lengths near block borders, so that prefixes meet.
fn tokens(most: usize) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![6 => Just(0u32), 1 => Just(1u32)], 0..most)
}

fn op() -> impl Strategy<Value = Op> {
    let at = 0..8usize;
    prop_oneof![
        4 => (tokens(30), 0..3usize, prop::bool::weighted(0.9), 0..3usize)
            .prop_map(|(tokens, salt, read_cache, keep_free)| Op::Open { tokens, salt, read_cache, keep_free }),
        4 => (at.clone(), tokens(10)).prop_map(|(at, tokens)| Op::Append { at, tokens }),
        8 => (at.clone(), prop_oneof![0..6usize, Just(100)]).prop_map(|(at, count)| Op::Compute { at, count }),
        3 => at.clone().prop_map(|at| Op::Fork { at }),
        2 => (at.clone(), 0..40usize).prop_map(|(at, len)| Op::Truncate { at, len }),
        4 => at.prop_map(|at| Op::Release { at }),
        1 => Just(Op::Reset),
    ]
}

const SALTS: [Option<&str>; 3] = [None, Some("a"), Some("b")];

/// What the keys and values of the last of these tokens depend on.
fn content(salt: usize, tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (salt, tokens).hash(&mut hasher);
    hasher.finish()
}

struct Sequence {
    table: BlockTable,
    tokens: Vec<u32>,
    salt: usize,
}

struct World {
    pool: BlockPool,
    block_size: usize,
    caching: bool,
    /// `None` is NaN.
    memory: Vec<Vec<Option<u64>>>,
    live: Vec<Sequence>,
    cached: NaiveCache,
}

impl World {
    fn new(num_blocks: usize, block_size: usize, hash_bits: u32, caching: bool) -> World {
        let config = PoolConfig {
            prefix_caching: caching,
            hash_bits,
            poison: true,
            hash_seed: Some(num_blocks as u64),
            ..PoolConfig::new(num_blocks, block_size)
        };
        World {
            pool: BlockPool::new(config).unwrap(),
            block_size,
            caching,
            memory: vec![vec![None; block_size]; num_blocks],
            live: Vec::new(),
            cached: NaiveCache::default(),
        }
    }

    fn owners(&self) -> HashMap<BlockId, u32> {
        let mut owners = HashMap::new();
        for block in self.live.iter().flat_map(|s| s.table.blocks()) {
            *owners.entry(*block).or_default() += 1;
        }
        owners
    }

    fn available(&self) -> usize {
        self.memory.len() - self.owners().len()
    }

    fn apply_memory_ops(&mut self) {
        let ops: Vec<MemOp> = self.pool.drain_memory_ops().collect();
        for op in ops {
            match op {
                MemOp::Copy { src, dst } => self.memory[dst.index()] = self.memory[src.index()].clone(),
                MemOp::Poison { block, from_slot } => {
                    assert!(!self.pool.is_cached(block) || from_slot > 0, "{block} is poisoned while cached");
                    self.memory[block.index()][from_slot..].fill(None);
                }
            }
        }
    }

    fn step(&mut self, op: &Op) {
        let before_free: Vec<BlockId> = self.pool.free_blocks().collect();
        let available = self.available();
        let count = self.live.len();
        match op {
            Op::Open { tokens, salt, read_cache, keep_free } => {
                let prompt = Prompt { tokens, salt: SALTS[*salt], read_cache: *read_cache };
                let hits = if *read_cache { self.cached.hit(*salt, tokens, self.block_size) } else { 0 };
                let owners = self.owners();
                let admission = self.pool.admit(prompt);
                assert_eq!(admission.cached_tokens(), hits * self.block_size);
                let usable = tokens.len().saturating_sub(1) / self.block_size;
                match admission.miss() {
                    None => assert!(!self.caching || hits == usable && usable > 0),
                    Some(MissReason::NotRead) => assert!(!read_cache),
                    Some(MissReason::ShorterThanBlock) => assert_eq!(usable, 0),
                    Some(MissReason::NotCached | MissReason::Collision) => assert!(hits < usable),
                }
                let needed = admission.blocks_needed();
                match admission.open(*keep_free) {
                    Ok(table) => {
                        assert!(needed + keep_free <= available);
                        let fresh = table.blocks()[hits..].to_vec();
                        let owned_anew = table.blocks().iter().filter(|b| !owners.contains_key(b)).count();
                        assert_eq!(needed, owned_anew);
                        self.live.push(Sequence { table, tokens: tokens.clone(), salt: *salt });
                        fresh.into_iter().for_each(|b| self.cached.forget(b));
                    }
                    Err(error) => {
                        assert!(needed + keep_free > available);
                        assert_eq!(error, NoSpace { wanted: needed + keep_free, free: available });
                    }
                }
            }
            Op::Append { at, tokens } if count > 0 => {
                let owners = self.owners();
                let s = &mut self.live[at % count];
                let old = s.table.blocks().to_vec();
                let room = old.len() * self.block_size - s.tokens.len();
                let shared = room > 0 && !tokens.is_empty() && owners[&old[old.len() - 1]] > 1;
                let wanted = tokens.len().saturating_sub(room).div_ceil(self.block_size) + usize::from(shared);
                assert_eq!(self.pool.blocks_needed([(&s.table, tokens.len())]), wanted);
                match self.pool.append(&mut s.table, tokens) {
                    Ok(first_changed) => {
                        assert!(wanted <= available);
                        s.tokens.extend(tokens);
                        let new = s.table.blocks().to_vec();
                        assert_eq!(old[..first_changed], new[..first_changed]);
                        assert_eq!(first_changed, old.len() - usize::from(shared));
                        if room > 0 && !tokens.is_empty() && !shared {
                            self.cached.forget(old[old.len() - 1]);
                        }
                        new[first_changed..].iter().for_each(|b| self.cached.forget(*b));
                    }
                    Err(error) => {
                        assert_eq!(error, NoSpace { wanted, free: available });
                        assert_eq!((s.table.blocks(), s.table.tokens()), (&old[..], &s.tokens[..]));
                    }
                }
            }
            Op::Compute { at, count: most } if count > 0 => self.compute(at % count, *most),
            Op::Fork { at } if count > 0 => {
                let s = &self.live[at % count];
                match self.pool.fork(&s.table) {
                    Ok(table) => self.live.push(Sequence { table, tokens: s.tokens.clone(), salt: s.salt }),
                    Err(error) => {
                        assert!(error.committed < error.len && error.len == s.tokens.len())
                    }
                }
            }
            Op::Truncate { at, len } if count > 0 => {
                let owners = self.owners();
                let s = &mut self.live[at % count];
                let cut = *len < s.tokens.len();
                self.pool.truncate(&mut s.table, *len);
                s.tokens.truncate(*len);
                let tail = s.table.blocks().last().copied();
                if let Some(tail) = tail.filter(|b| cut && len % self.block_size > 0 && owners[b] == 1) {
                    self.cached.forget(tail);
                }
            }
            Op::Release { at } if count > 0 => {
                let s = self.live.swap_remove(at % count);
                self.pool.release(s.table);
            }
            Op::Reset => {
                assert_eq!(self.pool.reset_prefix_cache(), self.owners().is_empty());
                if self.owners().is_empty() {
                    self.cached.clear();
                }
            }
            _ => {}
        }
        self.apply_memory_ops();
        self.check(&before_free, available);
    }

    /// Writes the keys of the next tokens and commits them, as a forward pass would.
    fn compute(&mut self, at: usize, most: usize) {
        let owners = self.owners();
        let s = &mut self.live[at];
        let (start, end) = (s.table.committed(), (s.table.committed() + most).min(s.tokens.len()));
        for (position, slot) in (start..end).zip(s.table.slots(start..end)) {
            let (block, offset) = (slot as usize / self.block_size, slot as usize % self.block_size);
            assert_eq!(owners[&BlockId(block as u32)], 1, "a shared block is written");
            assert!(!self.cached.contains(BlockId(block as u32)), "a cached block is written");
            self.memory[block][offset] = Some(content(s.salt, &s.tokens[..=position]));
        }
        self.pool.commit(&mut s.table, end);
        if self.caching {
            for k in start / self.block_size..end / self.block_size {
                let prefix = &s.tokens[..(k + 1) * self.block_size];
                self.cached.store(s.table.blocks()[k], s.salt, prefix);
            }
        }
    }

    fn check(&self, before_free: &[BlockId], available_before: usize) {
        self.pool.audit(self.live.iter().map(|s| &s.table)).unwrap();
        let gauges = self.pool.gauges();
        assert_eq!(gauges.in_use, self.owners().len());
        assert_eq!(gauges.in_use + gauges.cached + gauges.free, self.memory.len());
        assert_eq!(before_free.len(), available_before);
        for id in 0..self.memory.len() as u32 {
            assert_eq!(self.pool.is_cached(BlockId(id)), self.cached.contains(BlockId(id)), "block {id}");
        }
        for s in &self.live {
            assert_eq!(s.table.tokens(), s.tokens);
            for (position, slot) in (0..s.table.committed()).zip(s.table.slots(0..s.table.committed())) {
                let found = self.memory[slot as usize / self.block_size][slot as usize % self.block_size];
                assert_eq!(found, Some(content(s.salt, &s.tokens[..=position])), "position {position}");
            }
        }
        // What is neither cached nor in use is poisoned.
        for block in self.pool.free_blocks().filter(|b| !self.pool.is_cached(*b)) {
            assert!(self.memory[block.index()].iter().all(Option::is_none), "{block} is free and readable");
        }
    }
}

fn play(num_blocks: usize, block_size: usize, hash_bits: u32, caching: bool, history: &[Op]) {
    let mut world = World::new(num_blocks, block_size, hash_bits, caching);
    for op in history {
        world.step(op);
    }
    for s in std::mem::take(&mut world.live) {
        world.pool.release(s.table);
    }
    assert_eq!(world.pool.gauges().in_use, 0);
    world.pool.audit([]).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_history_keeps_books_and_contents(
        num_blocks in 1..24usize,
        block_size in 1..6usize,
        caching in prop::bool::weighted(0.9),
        history in prop::collection::vec(op(), 1..120),
    ) {
        play(num_blocks, block_size, 128, caching, &history);
    }

    #[test]
    fn collisions_change_nothing_but_time(
        num_blocks in 1..24usize,
        block_size in 1..6usize,
        hash_bits in 1..5u32,
        history in prop::collection::vec(op(), 1..120),
    ) {
        play(num_blocks, block_size, hash_bits, true, &history);
    }
}
