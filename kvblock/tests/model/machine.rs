//! The machine: a pool, a naive model of it, and simulated memory.
//!
//! [`drive`] interprets any bytes: the first eight choose a pool, each following eight an operation. After every
//! operation it checks the metadata, the contents of all blocks, the order of the free list, what the host tier keeps and
//! evicts, and the replayed events.
//!
//! Memory operations are applied late: in order, but some at a time, and several calls after they were ordered, unless
//! slots are written before. Contents are checked as they will be once all are applied.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use kvblock::{
    Admission, BlockEvent, BlockId, BlockPool, BlockTable, CacheGroup, GroupTable, HostBlockId, MemOp, MissReason,
    NoSpace, PoolConfig, PrefixHash, Prompt, Swapped, TableError, Tier,
};

use super::keys::{KEYS, contents, prompt};
use super::naive::{Id, NaiveCache, first_read};

/// Number of bytes that choose a pool or an operation.
pub const STEP: usize = 8;

/// Greatest number of live sequences, swapped ones included.
const MAX_SEQUENCES: usize = 12;

thread_local! {
    /// The methods that this thread has called through `call!`.
    pub static CALLED: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
}

/// Calls a method, and records that it ran.
macro_rules! call {
    ($kind:ident::$method:ident($($argument:expr),* $(,)?)) => {{
        CALLED.with_borrow_mut(|called| called.insert(concat!(stringify!($kind), "::", stringify!($method))));
        $kind::$method($($argument),*)
    }};
}

/// Runs the operations that these bytes encode. Panics if a check fails.
pub fn drive(bytes: &[u8]) {
    let mut steps = bytes.chunks_exact(STEP);
    let Some(pool) = steps.next() else { return };
    let mut world = World::new(pool);
    for step in steps {
        world.step(step);
    }
    world.end();
}

/// Tokens with many common prefixes: few kinds and long equal beginnings.
fn tokens(kind: u8, len: usize) -> Vec<u32> {
    let mut tokens = vec![0; len];
    if let Some(token) = tokens.get_mut(usize::from(kind >> 2) % 24) {
        *token = u32::from(kind & 3);
    }
    tokens
}

struct Sequence {
    table: BlockTable,
    tokens: Vec<u32>,
    key: usize,
    /// Identity of the prefix up to each full committed block.
    chain: Vec<Id>,
    /// First entry with invalid contents. Everything from there on must not be found.
    invalid: Option<usize>,
}

impl Sequence {
    /// Keeps the first `entries` of the table.
    fn truncate(&mut self, entries: usize) {
        self.invalid = self.invalid.filter(|first| *first < entries);
    }
}

/// A sequence that was swapped out.
struct SwappedSequence {
    tokens: Vec<u32>,
    key: usize,
    chain: Vec<Id>,
    invalid: Option<usize>,
    /// The entries of each group: holes, then host blocks.
    groups: Vec<(usize, Vec<HostBlockId>)>,
}

/// What memory operations are the result of.
#[derive(Clone, Copy, PartialEq)]
enum Cause {
    /// Blocks that a table needed; a cached one among them was evicted.
    Allocation,
    /// A request that was swapped out.
    SwapOut,
    Other,
}

/// A block of either tier.
type Place = (Tier, u32);

/// The places between which an operation copies.
fn copied(op: MemOp) -> Option<(Place, Place)> {
    match op {
        MemOp::Copy { src, dst } => Some(((Tier::Device, src.0), (Tier::Device, dst.0))),
        MemOp::SwapOut { src, dst } => Some(((Tier::Device, src.0), (Tier::Host, dst.0))),
        MemOp::SwapIn { src, dst } => Some(((Tier::Host, src.0), (Tier::Device, dst.0))),
        _ => None,
    }
}

/// The contents of all slots; `None` is NaN.
#[derive(Clone)]
struct Memory {
    device: Vec<Vec<Option<u64>>>,
    host: Vec<Vec<Option<u64>>>,
}

impl Memory {
    fn apply(&mut self, op: MemOp) {
        match op {
            MemOp::Copy { src, dst } => self.device[dst.index()] = self.device[src.index()].clone(),
            MemOp::Poison { block, from_slot } => self.device[block.index()][from_slot..].fill(None),
            MemOp::SwapOut { src, dst } => self.host[dst.index()] = self.device[src.index()].clone(),
            MemOp::SwapIn { src, dst } => self.device[dst.index()] = self.host[src.index()].clone(),
            other => panic!("{other}: unknown to the machine"),
        }
    }
}

/// Result of a computation over invalid contents. No valid contents are equal to it.
const GARBAGE: u64 = u64::MAX;

struct World {
    pool: BlockPool,
    groups: Vec<CacheGroup>,
    block_size: usize,
    caching: bool,
    host_caching: bool,
    /// Whether equal hashes mean equal prefixes.
    wide_hash: bool,
    memory: Memory,
    /// Number of operations that are ordered, observed and not applied.
    observed: usize,
    live: Vec<Sequence>,
    swapped: Vec<(Swapped, Vec<SwappedSequence>)>,
    cached: NaiveCache,
    /// The index, reconstructed from the events.
    replica: BTreeMap<(Tier, usize, PrefixHash), Vec<u32>>,
    /// Group and hash of all cached host blocks.
    host_hashes: BTreeMap<HostBlockId, (usize, PrefixHash)>,
    /// Cached host blocks that the operation copies to the device.
    held: Vec<HostBlockId>,
    /// Host blocks of swapped sequences, before the operation and with those that it swaps out.
    host_in_use: usize,
    /// Blocks that the operation allocated.
    allocated: BTreeSet<BlockId>,
    /// Cached blocks that the operation shared.
    hits: BTreeSet<BlockId>,
    /// Free cached blocks that the operation removed from the index, which moved them to the front.
    uncached: BTreeSet<BlockId>,
    /// Group and hash of all cached blocks before the operation.
    hashes: BTreeMap<BlockId, (usize, PrefixHash)>,
    /// The hash seed and the size of the metadata, which never change.
    constants: (Option<u64>, usize),
    /// Whether the operation released one whole table, so that the cached blocks that it freed are one chain.
    released_table: bool,
}

impl World {
    fn new(bytes: &[u8]) -> World {
        let [blocks, size, bits, caching, groups, window, host, seed] =
            [0, 1, 2, 3, 4, 5, 6, 7].map(|i| usize::from(bytes[i]));
        let sliding = |window: usize| CacheGroup::Sliding { window: 1 + window % 12 };
        let groups = match groups % 8 {
            0..4 => vec![CacheGroup::Full],
            4 => vec![CacheGroup::Full, sliding(window)],
            5 => vec![sliding(window), CacheGroup::Full, sliding(window / 12)],
            6 => vec![sliding(window)],
            _ => vec![sliding(window), sliding(window / 12)],
        };
        let (num_blocks, block_size) = ((1 + blocks % 24) * groups.len(), 1 << (size % 4));
        let hash_bits = [128, 128, 4, 1][bits % 4];
        let config = PoolConfig {
            prefix_caching: caching % 8 > 0,
            hash_bits,
            poison: true,
            hash_seed: Some(seed as u64),
            groups: groups.clone(),
            host_blocks: host % 32,
            host_caching: host / 32 % 4 > 0,
            events: true,
            ..PoolConfig::new(num_blocks, block_size)
        };
        let (caching, host_caching) = (config.prefix_caching, config.prefix_caching && config.host_caching);
        let pool = call!(BlockPool::new(config)).unwrap();
        let constants = (caching.then_some(seed as u64), pool.metadata_bytes());
        World {
            caching,
            host_caching,
            pool,
            groups,
            block_size,
            wide_hash: hash_bits == 128,
            memory: Memory {
                device: vec![vec![None; block_size]; num_blocks],
                host: vec![vec![None; block_size]; host % 32],
            },
            observed: 0,
            live: Vec::new(),
            swapped: Vec::new(),
            cached: NaiveCache::default(),
            replica: BTreeMap::new(),
            host_hashes: BTreeMap::new(),
            held: Vec::new(),
            host_in_use: 0,
            allocated: BTreeSet::new(),
            hits: BTreeSet::new(),
            uncached: BTreeSet::new(),
            hashes: BTreeMap::new(),
            constants,
            released_table: false,
        }
    }

    fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.live.iter().map(|s| &s.table)
    }

    fn owners(&self) -> BTreeMap<BlockId, u32> {
        let mut owners = BTreeMap::new();
        for block in self.tables().flat_map(all_blocks) {
            *owners.entry(block).or_default() += 1;
        }
        owners
    }

    fn available(&self) -> usize {
        self.memory.device.len() - self.owners().len()
    }

    fn step(&mut self, bytes: &[u8]) {
        let before_free: Vec<BlockId> = self.pool.free_blocks().collect();
        self.allocated.clear();
        self.hits.clear();
        self.uncached.clear();
        self.hashes = cached_hashes(&self.pool);
        self.released_table = false;
        self.host_in_use = self.host_blocks_in_use();
        let (a, b, c, d) = (usize::from(bytes[1]), bytes[2], usize::from(bytes[3]), usize::from(bytes[4]));
        let has_capacity = self.live.len() + self.swapped.iter().map(|s| s.1.len()).sum::<usize>() < MAX_SEQUENCES;
        let some = (!self.live.is_empty()).then(|| a % self.live.len().max(1));
        match (bytes[0] % 39, some) {
            (0..6, _) if has_capacity => {
                self.open(&tokens(b, a % 32), c % KEYS.len(), d, usize::from(bytes[5]) % 3, bytes[6].is_multiple_of(2))
            }
            (6..10, Some(at)) if self.live[at].tokens.len() < 40 => self.append(at, &tokens(b, c % 10)),
            (10..17, Some(at)) => self.compute(at, if c % 3 == 0 { 100 } else { c % 16 }),
            (17..20, Some(at)) if has_capacity => self.fork(at),
            (20, Some(at)) => self.truncate(at, c % 40),
            (21, Some(at)) => self.replace(at, c % 40, u32::from(b)),
            (22..25, Some(at)) => self.release(at, d % 4 == 0),
            (25 | 26, Some(at)) => self.empty(at),
            (27 | 28, Some(at)) => self.swap_out(at, 1 + c % 3),
            (29 | 30, _) if !self.swapped.is_empty() => self.swap_in(a % self.swapped.len(), d % 3, c % 8 == 0),
            (31, _) => self.reset(),
            (32..34, _) => self.forget(a, d % 4 == 0),
            (34, Some(at)) => self.exceed_table(at, c),
            (35, _) => self.use_foreign_tables(d),
            (36, _) => self.copy_to_host(&tokens(b, a % 40), c % KEYS.len()),
            (37 | 38, _) => self.insert_on_host(&tokens(b, a % 40), c % KEYS.len(), d),
            _ => {}
        }
        self.observe(Cause::Other);
        self.replay_events();
        self.check();
        self.check_order(&before_free);
        match bytes[7] % 4 {
            0 => self.apply_memory_ops(usize::MAX),
            1 => self.apply_memory_ops(usize::from(bytes[7] / 4 % 8)),
            _ => {}
        }
    }

    fn open(&mut self, tokens: &[u32], key: usize, how: usize, keep_free: usize, hashed: bool) {
        let read_cache = !how.is_multiple_of(8);
        let bs = self.block_size;
        let prompt = Prompt { read_cache, ..prompt(key, tokens) };
        let hits = if read_cache && self.caching { self.cached.hit(&self.groups, key, tokens, bs) } else { 0 };
        let (owners, available) = (self.owners(), self.available());
        let hashes = hashed.then(|| call!(BlockPool::hash_prompt(&self.pool, prompt)));
        let prompt = Prompt { hashes: hashes.as_ref(), ..prompt };
        let lookup = call!(BlockPool::lookup(&self.pool, prompt));
        let chain = self.chain(key, tokens, hits);
        let loads = self.loads(key, tokens, &chain);
        let admission = call!(BlockPool::admit(&mut self.pool, prompt));
        let (cached_tokens, miss) = (call!(Admission::cached_tokens(&admission)), call!(Admission::miss(&admission)));
        let (host_tokens, needed) =
            (call!(Admission::host_tokens(&admission)), call!(Admission::blocks_needed(&admission)));
        let admitted = (cached_tokens, host_tokens, needed, miss);
        assert_eq!((lookup.cached_tokens, lookup.host_tokens, lookup.blocks_needed, lookup.miss), admitted);
        assert_eq!(host_tokens, loads.iter().map(|(k, ..)| k).collect::<BTreeSet<_>>().len() * bs);
        assert_eq!(cached_tokens, hits * bs);
        let usable = tokens.len().saturating_sub(1) / bs;
        match miss {
            None => assert!(!self.caching || hits == usable && usable > 0),
            Some(MissReason::NotRead) => assert!(!read_cache),
            Some(MissReason::ShorterThanBlock) => assert_eq!(usable, 0),
            Some(MissReason::Collision) => assert!(hits < usable && !self.wide_hash),
            Some(MissReason::NoSharedPrefix | MissReason::Evicted) => assert!(hits < usable),
        }
        match call!(Admission::open(admission, keep_free)) {
            Ok(table) => {
                assert!(needed + keep_free <= available);
                assert_eq!((table.tokens(), table.committed()), (&tokens[..hits * bs], hits * bs));
                for (g, kind) in self.groups.iter().enumerate() {
                    let group = &table.groups()[g];
                    assert_eq!(call!(GroupTable::holes(group)), first_read(*kind, hits * bs) / bs);
                    assert_eq!(call!(GroupTable::num_entries(group)), hits);
                    let is_shared = |k: &usize| loads.iter().all(|(at, of, _)| (at, of) != (k, &g));
                    self.hits.extend((0..hits).filter(is_shared).filter_map(|k| call!(GroupTable::entry(group, k))));
                }
                assert_eq!(needed, all_blocks(&table).filter(|b| !owners.contains_key(b)).count());
                self.held = loads.iter().map(|(.., host)| *host).collect();
                self.held.iter().for_each(|host| self.cached.host_order.retain(|other| other != host));
                self.observe(Cause::Allocation);
                assert_eq!(self.held, [], "a block of the host tier was not loaded");
                let mut by_position = loads.clone();
                by_position.sort_by_key(|(k, ..)| std::cmp::Reverse(*k));
                by_position.iter().for_each(|(.., host)| self.cached.use_host(*host));
                let groups = table.groups().to_vec();
                let mut owners = self.owners();
                owners.extend(all_blocks(&table).map(|block| (block, 1)));
                let mut s = Sequence { table, tokens: tokens[..hits * bs].to_vec(), key, chain, invalid: None };
                if !loads.is_empty() {
                    let hashes = Hashes { pool: &self.pool, before: &self.hashes, owners: &owners };
                    self.uncached.extend(store_full(&mut self.cached, &mut s, &groups, 0..hits, &hashes));
                }
                self.live.push(s);
                self.append(self.live.len() - 1, &tokens[hits * bs..]);
            }
            Err(error) => {
                assert!(needed + keep_free > available);
                assert_eq!(error, NoSpace { wanted: needed + keep_free, free: available });
            }
        }
    }

    /// Identities of the prefixes of a hit.
    fn chain(&self, key: usize, tokens: &[u32], hits: usize) -> Vec<Id> {
        let mut chain = Vec::new();
        for k in 0..hits {
            let (prefix, parent) = (&tokens[..(k + 1) * self.block_size], chain.last().copied());
            let mut groups = 0..self.groups.len();
            chain.push(groups.find_map(|g| self.cached.id(g, key, prefix, parent)).unwrap());
        }
        chain
    }

    /// The host blocks that a hit needs, with their positions and groups, by group.
    fn loads(&self, key: usize, tokens: &[u32], chain: &[Id]) -> Vec<(usize, usize, HostBlockId)> {
        let (bs, mut loads) = (self.block_size, Vec::new());
        for (g, kind) in self.groups.iter().enumerate() {
            for k in first_read(*kind, chain.len() * bs) / bs..chain.len() {
                let (prefix, parent) = (&tokens[..(k + 1) * bs], k.checked_sub(1).map(|before| chain[before]));
                if self.cached.id_on_device(g, key, prefix, parent).is_none() {
                    loads.push((k, g, self.cached.on_host(g, key, prefix, parent).unwrap()));
                }
            }
        }
        loads
    }

    fn append(&mut self, at: usize, tokens: &[u32]) {
        let (owners, available) = (self.owners(), self.available());
        let s = &mut self.live[at];
        let old = s.table.groups().to_vec();
        let entries = old[0].num_entries();
        let free_slots = entries * self.block_size - s.tokens.len();
        let writes_last = free_slots > 0 && !tokens.is_empty();
        let last: Vec<BlockId> =
            old.iter().filter_map(|g| g.blocks().last().copied()).filter(|_| writes_last).collect();
        let shared = last.iter().filter(|b| owners[b] > 1).count();
        let wanted = old.len() * tokens.len().saturating_sub(free_slots).div_ceil(self.block_size) + shared;
        assert_eq!(call!(BlockPool::blocks_needed(&self.pool, [(&s.table, tokens.len())])), wanted);
        let mut allocated = BTreeSet::new();
        match call!(BlockPool::append(&mut self.pool, &mut s.table, tokens)) {
            Ok(first_changed) => {
                assert!(wanted <= available);
                s.tokens.extend(tokens);
                assert_eq!(first_changed, entries - usize::from(shared > 0));
                for (old, new) in old.iter().zip(s.table.groups()) {
                    assert!((0..first_changed).all(|k| old.entry(k) == new.entry(k)));
                    let changed = (0..new.num_entries()).filter(|k| old.entry(*k) != new.entry(*k));
                    allocated.extend(changed.filter_map(|k| new.entry(k)));
                }
                assert_eq!(allocated.len(), wanted);
                self.observe(Cause::Allocation);
                last.iter().filter(|b| owners[b] == 1).for_each(|b| self.cached.forget(*b));
                allocated.iter().for_each(|b| self.cached.forget(*b));
                self.allocated.extend(allocated);
            }
            Err(error) => {
                assert_eq!(error, TableError::NoSpace(NoSpace { wanted, free: available }));
                assert_eq!((s.table.groups(), s.table.tokens()), (&old[..], &s.tokens[..]));
            }
        }
    }

    /// Writes the contents of the next tokens and commits them, like a forward pass.
    fn compute(&mut self, at: usize, most: usize) {
        self.apply_memory_ops(usize::MAX);
        let owners = self.owners();
        let bs = self.block_size;
        let s = &mut self.live[at];
        let (start, end) = (s.table.committed(), (s.table.committed() + most).min(s.tokens.len()));
        for g in 0..self.groups.len() {
            let values = contents(g, s.key, &s.tokens);
            if g == 0 {
                assert!(call!(BlockTable::slots(&s.table, start..end)).eq(s.table.slots_in(0, start..end)));
            }
            for (position, slot) in (start..end).zip(call!(BlockTable::slots_in(&s.table, g, start..end))) {
                let (block, offset) = (slot as usize / bs, slot as usize % bs);
                assert_eq!(owners[&BlockId(block as u32)], 1, "a shared block would be written");
                assert!(!self.cached.contains(BlockId(block as u32)), "a cached block would be written");
                let is_valid = s.invalid.is_none_or(|first| position / bs < first);
                self.memory.device[block][offset] = Some(if is_valid { values[position] } else { GARBAGE });
            }
        }
        let computed = s.table.groups().to_vec();
        call!(BlockPool::commit(&mut self.pool, &mut s.table, end)).unwrap();
        if self.caching {
            let full = start / bs..s.invalid.unwrap_or(usize::MAX).min(end / bs);
            let hashes = Hashes { pool: &self.pool, before: &self.hashes, owners: &owners };
            let orphans = store_full(&mut self.cached, s, &computed, full, &hashes);
            self.uncached.extend(orphans);
        }
    }

    /// Commits and replaces tokens beyond the end: refused.
    fn exceed_table(&mut self, at: usize, more: usize) {
        let s = &mut self.live[at];
        let (wanted, len) = (s.tokens.len() + 1 + more, s.tokens.len());
        assert_eq!(self.pool.commit(&mut s.table, wanted), Err(TableError::BeyondEnd { wanted, len }));
        assert_eq!(self.pool.replace(&mut s.table, len + more, 0), None);
    }

    /// Calls the pool with a table and a swapped sequence of another pool. Both are refused and do not change.
    fn use_foreign_tables(&mut self, how: usize) {
        let mut theirs = BlockPool::new(PoolConfig { host_blocks: 8, ..PoolConfig::new(8, 4) }).unwrap();
        let mut table = theirs.admit(Prompt::new(&[0; 9])).open(0).unwrap();
        theirs.append(&mut table, &[0; 9]).unwrap();
        theirs.commit(&mut table, 9).unwrap();
        let fork = theirs.fork(&table).unwrap();
        let mut swapped = theirs.swap_out(&mut vec![fork]).unwrap();
        assert!(theirs.owns(&table) && !call!(BlockPool::owns(&self.pool, &table)));
        let foreign = TableError::ForeignTable;
        assert_eq!(self.pool.append(&mut table, &[1]), Err(foreign));
        assert_eq!(self.pool.commit(&mut table, 9), Err(foreign));
        assert_eq!(self.pool.truncate(&mut table, 0), Err(foreign));
        assert_eq!(self.pool.replace(&mut table, 8, 1), None);
        assert_eq!(self.pool.fork(&table).map(drop), Err(foreign));
        assert_eq!(self.pool.try_release(&mut table), Err(foreign));
        assert_eq!(self.pool.blocks_needed([(&table, 9)]), 0);
        assert_eq!(self.pool.swap_in(&mut swapped, 0).map(drop), Err(foreign));
        let mut tables = vec![table];
        assert_eq!(self.pool.swap_out(&mut tables).map(drop), Err(foreign));
        // Released to the wrong pool, their blocks go back to their own.
        match how % 3 {
            0 => tables.into_iter().for_each(|table| self.pool.release(table)),
            1 => call!(BlockPool::discard(&mut self.pool, swapped)),
            _ => tables.into_iter().for_each(|table| theirs.release(table)),
        }
        theirs.take_leaks();
    }

    fn fork(&mut self, at: usize) {
        let s = &self.live[at];
        match call!(BlockPool::fork(&mut self.pool, &s.table)) {
            Ok(table) => {
                let fork = Sequence {
                    table,
                    tokens: s.tokens.clone(),
                    key: s.key,
                    chain: s.chain.clone(),
                    invalid: s.invalid,
                };
                assert_eq!(fork.table.groups(), s.table.groups());
                self.live.push(fork);
            }
            Err(error) => {
                let (committed, len) = (s.table.committed(), s.tokens.len());
                assert!(committed < len);
                assert_eq!(error, TableError::Uncommitted { committed, len });
            }
        }
    }

    fn truncate(&mut self, at: usize, len: usize) {
        let owners = self.owners();
        let bs = self.block_size;
        let s = &mut self.live[at];
        let cuts = len < s.tokens.len();
        let committed = s.table.committed().min(len);
        let lost =
            s.table.groups().iter().zip(&self.groups).any(|(g, kind)| g.holes() * bs > first_read(*kind, committed));
        let before = s.table.groups().to_vec();
        match call!(BlockPool::truncate(&mut self.pool, &mut s.table, len)) {
            Err(TableError::BeyondEnd { wanted, len: found }) => {
                assert!(wanted == len && found == s.tokens.len() && len > found);
            }
            Ok(()) => {
                assert!(!cuts || !lost);
                assert!(len <= s.tokens.len());
                s.tokens.truncate(len);
                s.chain.truncate(committed / bs);
                s.truncate(s.tokens.len().div_ceil(bs));
                if cuts && !len.is_multiple_of(bs) {
                    let tails = s.table.groups().iter().filter_map(|g| g.blocks().last().copied());
                    tails.filter(|b| owners[b] == 1).for_each(|b| self.cached.forget(b));
                }
            }
            Err(error) => {
                assert!(cuts && lost && matches!(error, TableError::BehindWindow { .. }));
                assert_eq!((s.table.groups(), s.table.tokens()), (&before[..], &s.tokens[..]));
            }
        }
    }

    fn replace(&mut self, at: usize, position: usize, token: u32) {
        let s = &mut self.live[at];
        let uncommitted = s.table.committed()..s.tokens.len();
        let before = uncommitted.contains(&position).then(|| std::mem::replace(&mut s.tokens[position], token));
        assert_eq!(call!(BlockPool::replace(&mut self.pool, &mut s.table, position, token)), before);
        assert_eq!(s.table.tokens(), s.tokens);
    }

    /// Releases a table, or drops it.
    fn release(&mut self, at: usize, leak: bool) {
        let s = self.live.swap_remove(at);
        self.released_table = true;
        if leak {
            let blocks = all_blocks(&s.table).count();
            drop(s.table);
            let leaks: Vec<usize> = call!(BlockPool::take_leaks(&mut self.pool)).iter().map(|l| l.blocks).collect();
            assert_eq!(leaks, if blocks > 0 { vec![blocks] } else { vec![] });
        } else if s.tokens.len().is_multiple_of(2) {
            call!(BlockPool::release(&mut self.pool, s.table));
        } else {
            let mut table = s.table;
            self.pool.try_release(&mut table).unwrap();
        }
    }

    /// Releases the blocks of a table, and goes on with the empty table.
    fn empty(&mut self, at: usize) {
        let s = &mut self.live[at];
        self.released_table = true;
        call!(BlockPool::try_release(&mut self.pool, &mut s.table)).unwrap();
        assert!(call!(BlockTable::is_empty(&s.table)) && call!(BlockTable::blocks(&s.table)).is_empty());
        assert_eq!((s.table.committed(), all_blocks(&s.table).count()), (0, 0));
        (s.tokens, s.chain, s.invalid) = (Vec::new(), Vec::new(), None);
    }

    fn swap_out(&mut self, at: usize, count: usize) {
        let end = (at + count).min(self.live.len());
        let (mut tables, mut sequences) = (Vec::new(), Vec::new());
        for s in self.live.drain(at..end) {
            tables.push(s.table);
            sequences.push((s.tokens, s.key, s.chain, s.invalid));
        }
        let before: Vec<Vec<kvblock::GroupTable<BlockId>>> = tables.iter().map(|t| t.groups().to_vec()).collect();
        let committed: Vec<usize> = tables.iter().map(BlockTable::committed).collect();
        let needed = call!(BlockPool::host_blocks_needed(&self.pool, tables.iter().map(|t| (t, t.committed()))));
        let host = self.pool.host_gauges();
        let free = host.free + host.cached;
        match call!(BlockPool::swap_out(&mut self.pool, &mut tables)) {
            Ok(swapped) => {
                assert!(tables.is_empty() && needed <= free && needed == call!(Swapped::blocks(&swapped)).len());
                assert!(call!(Swapped::tokens(&swapped)).map(<[u32]>::len).eq(committed));
                let copies = self.observe(Cause::SwapOut);
                let sequences = sequences.into_iter().zip(&before).zip(swapped.tokens());
                let sequences = sequences.map(|(((tokens, key, chain, invalid), groups), kept)| {
                    assert_eq!(&tokens[..kept.len()], kept);
                    let entries = kept.len().div_ceil(self.block_size);
                    let moved = |g: &kvblock::GroupTable<BlockId>| {
                        (g.holes(), (g.holes()..entries).filter_map(|k| Some(copies[&g.entry(k)?])).collect())
                    };
                    let invalid = invalid.filter(|first| *first < entries);
                    SwappedSequence {
                        tokens: kept.to_vec(),
                        key,
                        chain,
                        invalid,
                        groups: groups.iter().map(moved).collect(),
                    }
                });
                let sequences = sequences.collect();
                self.swapped.push((swapped, sequences));
            }
            Err(error) => {
                assert!(needed > free);
                assert_eq!(error, TableError::NoHostSpace(NoSpace { wanted: needed, free }));
                let back = tables.into_iter().zip(sequences);
                self.live.extend(back.map(|(table, (tokens, key, chain, invalid))| Sequence {
                    table,
                    tokens,
                    key,
                    chain,
                    invalid,
                }));
            }
        }
    }

    fn swap_in(&mut self, at: usize, keep_free: usize, discard: bool) {
        if discard {
            return self.pool.discard(self.swapped.swap_remove(at).0);
        }
        let (available, in_use) = (self.available(), self.pool.gauges().in_use);
        let wanted = call!(BlockPool::blocks_to_swap_in(&self.pool, &self.swapped[at].0)) + keep_free;
        match call!(BlockPool::swap_in(&mut self.pool, &mut self.swapped[at].0, keep_free)) {
            Ok(tables) => {
                assert!(wanted <= available);
                assert_eq!(self.pool.gauges().in_use - in_use + keep_free, wanted);
                self.observe(Cause::Allocation);
                for block in tables.iter().flat_map(all_blocks).filter(|b| !self.allocated.contains(b)) {
                    assert!(self.cached.contains(block));
                    self.hits.insert(block);
                }
                self.allocated.iter().for_each(|b| self.cached.forget(*b));
                let mut owners = self.owners();
                owners.extend(tables.iter().flat_map(all_blocks).map(|block| (block, 1)));
                for (table, sequence) in tables.into_iter().zip(self.swapped.swap_remove(at).1) {
                    let SwappedSequence { tokens, key, mut chain, invalid, .. } = sequence;
                    assert_eq!((table.tokens(), table.committed()), (&tokens[..], tokens.len()));
                    if self.groups.contains(&CacheGroup::Full) {
                        // A full group provides the identities; without one the sequence remembers them.
                        chain.clear();
                    }
                    let groups = table.groups().to_vec();
                    let mut s = Sequence { table, tokens, key, chain, invalid };
                    if self.caching {
                        let full = invalid.unwrap_or(usize::MAX).min(s.tokens.len() / self.block_size);
                        let hashes = Hashes { pool: &self.pool, before: &self.hashes, owners: &owners };
                        let orphans = store_full(&mut self.cached, &mut s, &groups, 0..full, &hashes);
                        self.uncached.extend(orphans);
                    }
                    self.live.push(s);
                }
            }
            Err(error) => assert_eq!(error, TableError::NoSpace(NoSpace { wanted, free: available })),
        }
    }

    /// Reports that a copy into a block of the pool or of the host failed; mostly a block of a table.
    fn forget(&mut self, which: usize, of_host: bool) {
        let owned: Vec<BlockId> = self.owners().into_keys().collect();
        let (device, host) = (self.memory.device.len(), self.memory.host.len());
        let (place, blocks) = match owned.get(which % (owned.len() + 3)) {
            _ if of_host => ((Tier::Host, (which % (host + 2)) as u32), host),
            Some(block) => ((Tier::Device, block.0), device),
            None => ((Tier::Device, (which % (device + 2)) as u32), device),
        };
        // What is ordered will copy the invalid contents.
        let mut invalid = BTreeSet::from([place]);
        for (from, to) in self.pool.memory_ops().filter_map(copied) {
            if invalid.contains(&from) {
                invalid.insert(to)
            } else {
                invalid.remove(&to)
            };
        }
        invalid.insert(place);
        let done = match place {
            (Tier::Device, id) => call!(BlockPool::forget_contents(&mut self.pool, BlockId(id))),
            (Tier::Host, id) => call!(BlockPool::forget_host_contents(&mut self.pool, HostBlockId(id))),
        };
        if place.1 as usize >= blocks {
            return assert_eq!(done, Err(TableError::NoSuchBlock { id: place.1, blocks }));
        }
        done.unwrap();
        match place {
            (Tier::Host, id) => self.memory.host[id as usize].fill(Some(GARBAGE)),
            // A free block without contents stays poisoned.
            (Tier::Device, id) if owned.contains(&BlockId(id)) || self.cached.contains(BlockId(id)) => {
                self.memory.device[id as usize].fill(Some(GARBAGE));
            }
            _ => {}
        }
        invalid.into_iter().for_each(|place| self.forgotten(place));
    }

    /// The contents of a block are invalid.
    fn forgotten(&mut self, place: Place) {
        match place {
            (Tier::Host, id) => {
                let host = HostBlockId(id);
                self.cached.forget_host(host);
                for (swapped, sequences) in &mut self.swapped {
                    for s in sequences {
                        let held = s.groups.iter();
                        let held = held.filter_map(|(holes, g)| Some(holes + g.iter().position(|b| *b == host)?));
                        s.invalid = held.chain(s.invalid).min();
                    }
                    let is_held = swapped.blocks().contains(&host);
                    assert!(!is_held || call!(BlockPool::holds_invalid_on_host(&self.pool, swapped)));
                }
            }
            (Tier::Device, id) => {
                let block = BlockId(id);
                if self.cached.contains(block) && self.pool.references(block) == 0 {
                    self.uncached.insert(block);
                }
                self.cached.forget(block);
                for s in &mut self.live {
                    let held = s.table.groups().iter();
                    let held = held.filter_map(|g| Some(g.holes() + g.blocks().iter().position(|b| *b == block)?));
                    let held: Vec<usize> = held.collect();
                    assert!(held.is_empty() || call!(BlockPool::holds_invalid(&self.pool, &s.table)));
                    s.invalid = held.into_iter().chain(s.invalid).min();
                }
            }
        }
    }

    fn reset(&mut self) {
        let idle = self.owners().is_empty() && self.host_blocks_in_use() == 0;
        assert_eq!(call!(BlockPool::reset_prefix_cache(&mut self.pool)), idle);
        if idle {
            self.cached.blocks.clear();
            self.cached.host.clear();
            self.cached.host_order.clear();
        }
    }

    /// The operations that were ordered since the last call.
    fn new_memory_ops(&mut self) -> Vec<MemOp> {
        let ops: Vec<MemOp> = call!(BlockPool::memory_ops(&self.pool)).skip(self.observed).collect();
        self.observed += ops.len();
        ops
    }

    /// Notes what the new memory operations say. Returns the host block of each block that will be swapped out.
    fn observe(&mut self, cause: Cause) -> BTreeMap<BlockId, HostBlockId> {
        let mut swapped_out = BTreeMap::new();
        for op in self.new_memory_ops() {
            match op {
                MemOp::Poison { block, from_slot } => {
                    // An orphan is poisoned too, but stays free.
                    let is_allocated =
                        cause == Cause::Allocation && call!(BlockPool::references(&self.pool, block)) > 0;
                    if is_allocated && from_slot == 0 && self.cached.contains(block) {
                        self.evicted(block);
                    }
                }
                MemOp::SwapOut { src, dst } => {
                    self.take_host(dst, &BTreeSet::new());
                    match cause {
                        Cause::Allocation => self.offloaded(src, dst),
                        Cause::SwapOut => {
                            self.host_in_use += 1;
                            swapped_out.insert(src, dst);
                        }
                        Cause::Other => panic!("{op}: for no reason"),
                    }
                }
                MemOp::SwapIn { src, dst } => {
                    self.held.retain(|held| *held != src);
                    self.allocated.insert(dst);
                }
                _ => {}
            }
        }
        swapped_out
    }

    /// Applies the oldest memory operations, at most this many.
    fn apply_memory_ops(&mut self, most: usize) {
        assert_eq!(self.pool.memory_ops().count(), self.observed);
        let ops: Vec<MemOp> = call!(BlockPool::drain_memory_ops(&mut self.pool)).take(most).collect();
        self.observed -= ops.len();
        ops.into_iter().for_each(|op| self.memory.apply(op));
    }

    fn host_blocks_in_use(&self) -> usize {
        self.swapped.iter().map(|swapped| swapped.0.blocks().len()).sum()
    }

    /// A host block gets new contents. If it cached a prefix, no other was free, and this one was least recently used. Host
    /// blocks in `named` may not be taken.
    fn take_host(&mut self, host: HostBlockId, named: &BTreeSet<HostBlockId>) {
        assert!(!named.contains(&host), "an operation that is ordered names {host}");
        if self.cached.host.contains_key(&host) {
            let first = self.cached.host_order.iter().find(|host| !named.contains(host));
            assert_eq!(first, Some(&host), "{host} is not the least recently used");
            assert_eq!(self.unused_host(named), 0, "a cached host block is evicted although others are free");
            self.cached.forget_host(host);
        }
    }

    /// Number of host blocks that are neither in use nor cached nor in `named`.
    fn unused_host(&self, named: &BTreeSet<HostBlockId>) -> usize {
        let in_use = |host: &HostBlockId| self.swapped.iter().any(|swapped| swapped.0.blocks().contains(host));
        let named = named.iter().filter(|host| !self.cached.host.contains_key(host) && !in_use(host)).count();
        self.memory.host.len() - self.host_in_use - self.cached.host.len() - named
    }

    /// The prefix of a block that is about to be evicted was copied to the host.
    fn offloaded(&mut self, block: BlockId, host: HostBlockId) {
        assert!(self.host_caching && self.cached.contains(block), "{block} is copied to the host, but caches nothing");
        assert_eq!(self.cached.host_copy_of(block), None, "the host has the prefix of {block} already");
        self.cached.offload(block, host);
        let hash = self.hashes[&block];
        self.host_hashes.insert(host, hash);
        self.forget_twins(host);
    }

    /// Copies a prefix to the host, without evicting it.
    fn copy_to_host(&mut self, tokens: &[u32], key: usize) {
        let bs = self.block_size;
        let len = if self.caching { self.cached.walk(&self.groups, key, tokens, bs).len() } else { 0 };
        let chain = self.chain(key, tokens, len);
        let copies = call!(BlockPool::copy_to_host(&mut self.pool, prompt(key, tokens)));
        let mut ops = self.new_memory_ops().into_iter();
        let groups = self.groups.len();
        for (k, g) in (0..if self.host_caching { len } else { 0 }).flat_map(|k| (0..groups).map(move |g| (k, g))) {
            let (prefix, parent) = (&tokens[..(k + 1) * bs], k.checked_sub(1).map(|before| chain[before]));
            if self.cached.id_on_device(g, key, prefix, parent).is_none() {
                continue;
            }
            if let Some(host) = self.cached.on_host(g, key, prefix, parent) {
                self.cached.use_host(host);
            } else if self.host_in_use < self.memory.host.len() {
                let Some(MemOp::SwapOut { src, dst }) = ops.next() else { panic!("block {k} is not copied") };
                self.take_host(dst, &BTreeSet::new());
                self.offloaded(src, dst);
                assert_eq!(self.cached.on_host(g, key, prefix, parent), Some(dst), "another block was copied");
            }
        }
        assert_eq!(ops.next(), None, "for no reason");
        for copy in &copies {
            assert!(call!(BlockPool::has_copy(&self.pool, copy)));
            let cached = &self.cached.host[&copy.host];
            assert_eq!((cached.group, &cached.prefix[..]), (copy.group, &tokens[..(copy.block + 1) * bs]));
        }
        let on_host = (0..len).flat_map(|k| (0..self.groups.len()).map(move |g| (k, g))).filter(|(k, g)| {
            let parent = k.checked_sub(1).map(|before| chain[before]);
            self.cached.on_host(*g, key, &tokens[..(k + 1) * bs], parent).is_some()
        });
        assert!(on_host.eq(copies.iter().map(|copy| (copy.block, copy.group))), "the list of copies");
    }

    /// Takes in blocks of a prompt, with contents from elsewhere.
    fn insert_on_host(&mut self, tokens: &[u32], key: usize, skipped: usize) {
        let bs = self.block_size;
        let mut wanted = BTreeSet::new();
        for (k, g) in (0..tokens.len() / bs).flat_map(|k| (0..self.groups.len()).map(move |g| (k, g))) {
            if !(k + g + skipped).is_multiple_of(5) {
                wanted.insert((k, g));
            }
        }
        let places = self.pool.memory_ops().filter_map(copied).flat_map(|(from, to)| [from, to]);
        let named = places.filter(|place| place.0 == Tier::Host).map(|place| HostBlockId(place.1));
        let named: BTreeSet<HostBlockId> = named.collect();
        let inserted = call!(BlockPool::insert_on_host(&mut self.pool, prompt(key, tokens), &wanted));
        let mut new = inserted.iter();
        let (mut parent, mut held) = (None, Vec::new());
        'blocks: for k in 0..if self.host_caching { tokens.len() / bs } else { 0 } {
            let prefix = &tokens[..(k + 1) * bs];
            let mut verified = None;
            for g in 0..self.groups.len() {
                if self.cached.id_on_device(g, key, prefix, parent).is_none() {
                    let known = self.cached.on_host(g, key, prefix, parent);
                    let host = match known {
                        Some(host) => Some(host),
                        None if wanted.contains(&(k, g)) => {
                            let Some(copy) = new.next() else {
                                let all_named = self.cached.host_order.iter().all(|host| named.contains(host));
                                assert!(all_named && self.unused_host(&named) == 0, "block {k} is not taken in");
                                break 'blocks;
                            };
                            assert_eq!((copy.block, copy.group), (k, g));
                            self.take_host(copy.host, &named);
                            self.cached.store_on_host(copy.host, g, key, prefix, parent);
                            let values = contents(g, key, prefix);
                            self.memory.host[copy.host.index()] = values[k * bs..].iter().map(|v| Some(*v)).collect();
                            self.host_hashes
                                .insert(copy.host, call!(BlockPool::host_prefix_of(&self.pool, copy.host)).unwrap());
                            self.forget_twins(copy.host);
                            Some(copy.host)
                        }
                        None => None,
                    };
                    if let Some(host) = host {
                        self.cached.host_order.retain(|other| *other != host);
                        held.push((k, host));
                    }
                }
                verified = verified.or(self.cached.id(g, key, prefix, parent));
            }
            let Some(id) = verified else { break };
            parent = Some(id);
        }
        assert_eq!(new.next(), None, "a block was taken in for no reason");
        held.sort_by_key(|(k, _)| std::cmp::Reverse(*k));
        held.into_iter().for_each(|(_, host)| self.cached.use_host(host));
    }

    /// Host blocks that no lookup reaches, because a new one has the same hash behind another parent, are dropped.
    fn forget_twins(&mut self, host: HostBlockId) {
        for twin in self.cached.host_twins(host, self.block_size) {
            if self.host_hashes[&twin] == self.host_hashes[&host] && self.cached.host_order.contains(&twin) {
                self.cached.forget_host(twin);
            }
        }
    }

    /// A cached block was evicted. The host has its prefix now, unless no block was left for it.
    fn evicted(&mut self, block: BlockId) {
        if self.host_caching {
            match self.cached.host_copy_of(block) {
                Some(host) => self.cached.use_host(host),
                None => {
                    let is_full = self.unused_host(&BTreeSet::new()) == 0;
                    assert!(is_full && self.cached.host_order.is_empty(), "the prefix of {block} is lost");
                }
            }
        }
        self.cached.forget(block);
    }

    fn replay_events(&mut self) {
        let events: Vec<BlockEvent> = call!(BlockPool::drain_events(&mut self.pool)).collect();
        if !self.wide_hash {
            return;
        }
        for event in events {
            match event {
                BlockEvent::Stored { tier: Tier::Host, group, parent, hashes, tokens, key } if tokens.is_empty() => {
                    assert_eq!((parent, key, hashes.len()), (None, None, 1));
                    let prefix = self.replica[&(Tier::Device, group, hashes[0])].clone();
                    self.replica.insert((Tier::Host, group, hashes[0]), prefix);
                }
                BlockEvent::Stored { tier, group, parent, hashes, tokens, .. } => {
                    let tiers = [Tier::Device, Tier::Host];
                    let known = |p| tiers.iter().find_map(|tier| self.replica.get(&(*tier, group, p)));
                    let mut prefix = parent.map_or(Vec::new(), |p| known(p).cloned().unwrap_or_default());
                    assert_eq!(tokens.len(), hashes.len() * self.block_size);
                    for (hash, tokens) in hashes.into_iter().zip(tokens.chunks(self.block_size)) {
                        prefix.extend(tokens);
                        // Stored again behind a parent that was evicted in between.
                        let before = self.replica.insert((tier, group, hash), prefix.clone());
                        assert!(
                            before.is_none_or(|before| before.ends_with(tokens)),
                            "stored twice with different tokens"
                        );
                    }
                }
                BlockEvent::Removed { tier, group, hash } => {
                    assert!(self.replica.remove(&(tier, group, hash)).is_some(), "not stored")
                }
                BlockEvent::Cleared => self.replica.clear(),
            }
        }
        let (blocks, host) = (0..self.memory.device.len() as u32, 0..self.memory.host.len() as u32);
        let on_device = blocks.filter_map(|b| self.pool.prefix_of(BlockId(b))).map(|(g, hash)| (Tier::Device, g, hash));
        let on_host = host.filter_map(|b| self.pool.host_prefix_of(HostBlockId(b))).map(|(g, h)| (Tier::Host, g, h));
        let indexed: BTreeSet<_> = on_device.chain(on_host).collect();
        assert!(self.replica.keys().eq(&indexed), "the replayed events differ from the index");
        for g in 0..self.pool.groups().len() {
            let mut seen = BTreeSet::new();
            for event in call!(BlockPool::cached_prefixes(&self.pool, g)) {
                let BlockEvent::Stored { tier, group, parent, hashes, .. } = event else {
                    panic!("expected stored events")
                };
                assert!(self.replica.contains_key(&(tier, group, hashes[0])), "a prefix is not in the index");
                let is_hole = self.pool.groups()[g] != CacheGroup::Full;
                let tiers = [Tier::Device, Tier::Host];
                assert!(
                    is_hole || parent.is_none_or(|parent| tiers.iter().any(|tier| seen.contains(&(*tier, parent)))),
                    "a parent comes after its child"
                );
                assert!(seen.insert((tier, hashes[0])), "a prefix is listed twice");
            }
        }
    }

    fn check(&self) {
        let pool = &self.pool;
        let mut memory = Cow::Borrowed(&self.memory);
        pool.memory_ops().for_each(|op| memory.to_mut().apply(op));
        call!(BlockPool::audit(pool, self.tables())).unwrap();
        call!(BlockPool::audit_host(pool, self.swapped.iter().map(|s| &s.0))).unwrap();
        let (gauges, owners) = (call!(BlockPool::gauges(pool)), self.owners());
        let sizes = (call!(BlockPool::block_size(pool)), call!(BlockPool::num_blocks(pool)));
        assert_eq!(sizes, (self.block_size, memory.device.len()));
        assert_eq!(call!(BlockPool::groups(pool)), &self.groups[..]);
        assert_eq!(call!(BlockPool::available(pool)), self.available());
        let constants = (call!(BlockPool::hash_seed(pool)), call!(BlockPool::metadata_bytes(pool)));
        assert_eq!(constants, self.constants);
        let (counters, stats) = (call!(BlockPool::counters(pool)), call!(BlockPool::stats(pool)));
        assert!(counters.peak_in_use >= owners.len() && counters.evicted <= counters.allocated);
        assert!(stats.hit_tokens <= stats.query_tokens && (self.caching || stats.lookups == 0));
        assert!(owners.iter().all(|(block, count)| pool.references(*block) == *count));
        assert_eq!(gauges.in_use, owners.len());
        assert_eq!(gauges.in_use + gauges.cached + gauges.free, memory.device.len());
        let host = call!(BlockPool::host_gauges(pool));
        assert_eq!((host.in_use, host.cached), (self.host_blocks_in_use(), self.cached.host.len()));
        assert_eq!(host.in_use + host.cached + host.free, memory.host.len());
        let on_host = (0..memory.host.len() as u32).map(HostBlockId).filter(|b| self.pool.host_prefix_of(*b).is_some());
        assert!(on_host.eq(self.cached.host.keys().copied()), "the host tier");
        assert_eq!(self.cached.host.len(), self.cached.host_order.len());
        for (block, cached) in &self.cached.host {
            let values = contents(cached.group, cached.key, &cached.prefix);
            let expected = values[values.len() - self.block_size..].iter().map(|v| Some(*v));
            assert!(memory.host[block.index()].iter().copied().eq(expected), "{block} is cached with wrong contents");
        }
        for id in 0..memory.device.len() as u32 {
            assert_eq!(call!(BlockPool::is_cached(pool, BlockId(id))), self.cached.contains(BlockId(id)), "block {id}");
        }
        let bs = self.block_size;
        for (block, cached) in &self.cached.blocks {
            let values = contents(cached.group, cached.key, &cached.prefix);
            let expected = values[values.len() - bs..].iter().map(|v| Some(*v));
            assert!(memory.device[block.index()].iter().copied().eq(expected), "{block} is cached with wrong contents");
        }
        for s in &self.live {
            assert_eq!(call!(BlockTable::tokens(&s.table)), s.tokens);
            assert_eq!(call!(BlockTable::len(&s.table)), s.tokens.len());
            assert_eq!(call!(BlockTable::key(&s.table)).is_none(), KEYS[s.key].is_empty());
            let committed = call!(BlockTable::committed(&s.table));
            for (g, kind) in self.groups.iter().enumerate() {
                assert!(
                    s.table.groups()[g].holes() * bs <= first_read(*kind, committed),
                    "a block that the window reads is a hole"
                );
                let values = contents(g, s.key, &s.tokens);
                let valid = s.invalid.unwrap_or(usize::MAX).saturating_mul(bs).min(committed);
                for (position, slot) in (0..valid).zip(s.table.slots_in(g, 0..valid)).filter(|(_, slot)| *slot >= 0) {
                    assert_eq!(
                        memory.device[slot as usize / bs][slot as usize % bs],
                        Some(values[position]),
                        "position {position}"
                    );
                }
            }
        }
        // Blocks that are neither cached nor in use are poisoned.
        for block in call!(BlockPool::free_blocks(pool)).filter(|b| !self.pool.is_cached(*b)) {
            assert!(memory.device[block.index()].iter().all(Option::is_none), "{block} is free but not poisoned");
        }
    }

    /// Checks that blocks are allocated from the front, that freed blocks go to the front if they are not cached and
    /// else to the back, and that the others keep their order.
    fn check_order(&self, before: &[BlockId]) {
        let before: Vec<BlockId> = before.iter().filter(|b| !self.uncached.contains(b)).copied().collect();
        let before = &before[..];
        let after: Vec<BlockId> = self.pool.free_blocks().collect();
        // An orphan that came to the front may have been allocated since.
        let allocated: BTreeSet<BlockId> = self.allocated.difference(&self.uncached).copied().collect();
        let front: BTreeSet<BlockId> =
            before.iter().filter(|b| !self.hits.contains(b)).take(allocated.len()).copied().collect();
        assert_eq!(allocated, front, "the allocated blocks were not first on the free list");
        let stayed = |list: &[BlockId], other: &[BlockId]| -> Vec<BlockId> {
            list.iter().filter(|b| other.contains(b)).copied().collect()
        };
        assert_eq!(stayed(before, &after), stayed(&after, before), "the order of the other blocks changed");
        let freed: Vec<bool> = after.iter().map(|b| !before.contains(b)).collect();
        let unhashed = after.iter().filter(|b| !self.cached.contains(**b)).count();
        let of_unhashed = freed[..unhashed].iter().filter(|f| **f).count();
        assert!(freed[..of_unhashed].iter().all(|f| *f), "a freed block that is not cached is not at the front");
        let first = after.len() - freed[unhashed..].iter().filter(|f| **f).count();
        assert!(freed[first..].iter().all(|f| *f), "a freed block that is cached is not at the back");
        let lengths: Vec<usize> = after[first..].iter().map(|b| self.cached.blocks[b].prefix.len()).collect();
        assert!(
            !self.released_table || lengths.is_sorted_by(|a, b| a >= b),
            "the beginning of a chain would be evicted before its end"
        );
    }

    /// Releases everything.
    fn end(mut self) {
        self.live.into_iter().for_each(|s| self.pool.release(s.table));
        self.swapped.into_iter().for_each(|s| self.pool.discard(s.0));
        assert_eq!((self.pool.gauges().in_use, self.pool.host_gauges().in_use), (0, 0));
        self.pool.audit([]).unwrap();
        self.pool.audit_host([]).unwrap();
        assert!(self.pool.reset_prefix_cache());
    }
}

fn all_blocks(table: &BlockTable) -> impl Iterator<Item = BlockId> + '_ {
    call!(BlockTable::groups(table)).iter().flat_map(|g| call!(GroupTable::blocks(g))).copied()
}

fn cached_hashes(pool: &BlockPool) -> BTreeMap<BlockId, (usize, PrefixHash)> {
    (0..pool.num_blocks() as u32)
        .map(BlockId)
        .filter_map(|block| Some((block, call!(BlockPool::prefix_of(pool, block))?)))
        .collect()
}

/// Hashes of blocks, which the naive cache does not have: before the operation, and now.
struct Hashes<'a> {
    pool: &'a BlockPool,
    before: &'a BTreeMap<BlockId, (usize, PrefixHash)>,
    owners: &'a BTreeMap<BlockId, u32>,
}

/// Stores the blocks `full` of a sequence in the naive cache, where `groups` has them. Removes and returns the free
/// blocks that became orphans: a new block has their hash and last tokens, but another parent.
fn store_full(
    cached: &mut NaiveCache,
    s: &mut Sequence,
    groups: &[kvblock::GroupTable<BlockId>],
    full: std::ops::Range<usize>,
    hashes: &Hashes<'_>,
) -> Vec<BlockId> {
    let block_size = hashes.pool.block_size();
    let mut all_orphans = Vec::new();
    for k in full {
        let parent = k.checked_sub(1).map(|before| s.chain[before]);
        let known = s.chain.get(k).copied();
        let prefix = &s.tokens[..(k + 1) * block_size];
        let mut id = known;
        for (g, group) in groups.iter().enumerate() {
            if let Some(block) = group.entry(k) {
                let is_new = !cached.contains(block) && cached.id_on_device(g, s.key, prefix, parent).is_none();
                let stored = cached.store(block, g, s.key, prefix, parent, known);
                id = id.or(Some(stored));
                let hash = hashes.pool.prefix_of(block);
                let is_orphan = |other: &BlockId| {
                    is_new && hashes.before.get(other).copied() == hash && !hashes.owners.contains_key(other)
                };
                let orphans: Vec<BlockId> = cached.others_with_tokens(block, block_size).filter(is_orphan).collect();
                orphans.iter().for_each(|orphan| cached.forget(*orphan));
                all_orphans.extend(orphans);
            }
        }
        if known.is_none() {
            s.chain.push(id.unwrap());
        }
    }
    all_orphans
}
