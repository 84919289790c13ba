//! A kernel plug-in: attention in plain loops, as a shared library.
//!
//! `example.plain` computes decode and prefill in float32. `example.fails` and `example.panics` show how errors are
//! reported. The library shares only the ABI with Quire.

#[path = "../../src/plugin/abi.rs"]
#[allow(dead_code)]
mod abi;

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::mem::offset_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::from_raw_parts;

/// Minor version of the ABI that the variants were written for.
const MINOR: u32 = match (cfg!(feature = "abi-1-0"), cfg!(feature = "abi-1-1")) {
    (true, _) => 0,
    (_, true) => 1,
    _ => abi::MINOR,
};
/// Whether the variants support attention sinks.
const SINKS: bool = MINOR >= 1;
/// Whether they support block-sparse attention.
const SPARSE: bool = MINOR >= 2;
/// Bytes of the arguments that are read.
const ATTENTION: usize = match MINOR {
    0 => offset_of!(abi::Attention, sinks),
    1 => offset_of!(abi::Attention, sparse_block_size),
    _ => size_of::<abi::Attention>(),
};

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs a kernel and turns an error or a panic into a code.
fn guarded(run: impl FnOnce() -> Result<(), String>) -> i32 {
    let (code, message) = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => return 0,
        Ok(Err(message)) => (1, message),
        Err(panic) => (2, format!("panic: {}", panic.downcast_ref::<&str>().unwrap_or(&"of unknown cause"))),
    };
    LAST_ERROR.with(|last| *last.borrow_mut() = message);
    code
}

unsafe extern "C" fn last_error(buffer: *mut c_char, capacity: usize) {
    LAST_ERROR.with(|last| {
        let text = last.borrow();
        let length = text.len().min(capacity.saturating_sub(1));
        // SAFETY: the buffer has `capacity` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, length);
            *buffer.add(length) = 0;
        }
    });
}

/// Computes one sequence and head of the output, as a task of the host's parallel loop.
unsafe extern "C" fn attend(context: *mut c_void, index: u64) {
    // SAFETY: the context is the arguments of the call that started the loop.
    let args = unsafe { &*context.cast::<abi::Attention>() };
    let (heads, seq) = (u64::from(args.num_heads), args.first_seq + index / u64::from(args.num_heads));
    // SAFETY: the host has checked the sizes that the header requires.
    unsafe { one_head(args, seq as usize, (index % heads) as usize) }
}

/// Whether a head of the query at a position sees the sparse block of another position.
fn sees(args: &abi::Attention, (head, kv_head): (usize, usize), position: usize, key: usize) -> bool {
    if !SPARSE || args.sparse_block_size == 0 {
        return true;
    }
    let (query, key) = (position as u64 / args.sparse_block_size, key as u64 / args.sparse_block_size);
    let step = u64::from(args.head_sliding_step.unsigned_abs());
    let index = if args.head_sliding_step >= 0 { args.first_head + head as u64 } else { args.first_kv_head + kv_head as u64 };
    key + args.local_blocks > query || (key + index * step + 1).is_multiple_of(args.vertical_stride)
}

unsafe fn one_head(args: &abi::Attention, seq: usize, head: usize) {
    let cache = &args.cache;
    let (dim, heads, block_size) = (cache.head_dim as usize, args.num_heads as usize, cache.block_size as usize);
    let kv_head = head / (heads / cache.num_kv_heads as usize);
    // SAFETY: the arrays have an element for each sequence, and `block_tables` a row.
    let (start, end, context, table) = unsafe {
        (
            *args.query_starts.add(seq) as usize,
            *args.query_starts.add(seq + 1) as usize,
            *args.context_lens.add(seq) as usize,
            from_raw_parts(args.block_tables.add(seq * args.max_blocks as usize), args.max_blocks as usize),
        )
    };
    for row in start..end {
        // SAFETY: one head of a query row, and the same part of the output, which no other task writes.
        let (query, output) = unsafe {
            (
                from_raw_parts(args.query.cast::<f32>().add(row * args.query_stride as usize + head * dim), dim),
                std::slice::from_raw_parts_mut(args.output.cast::<f32>().add((row * heads + head) * dim), dim),
            )
        };
        let position = (context > 0).then(|| context + row - end);
        let first = position.map_or(0, |p| if args.window == 0 { 0 } else { (p + 1).saturating_sub(args.window as usize) });
        let token = |cache_start: *mut c_void, at: usize| {
            let place = table[at / block_size] as usize * cache.block_stride as usize
                + kv_head * cache.head_stride as usize
                + at % block_size * cache.token_stride as usize;
            // SAFETY: one head of a token of the context, whose block is in the table.
            unsafe { from_raw_parts(cache_start.cast_const().cast::<f32>().add(place), dim) }
        };
        let mut sums = vec![0.0f64; dim];
        let (mut greatest, mut mass) = (f64::NEG_INFINITY, 0.0f64);
        // A sink starts the sum, without a value.
        if SINKS && !args.sinks.is_null() {
            // SAFETY: the array has an element for each head.
            (greatest, mass) = (f64::from(unsafe { *args.sinks.add(head) }), 1.0);
        }
        let visible = position.map_or(0..0, |p| first..p + 1);
        for at in visible.filter(|at| sees(args, (head, kv_head), position.unwrap_or(0), *at)) {
            let key = token(cache.keys, at);
            let product: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let score = f64::from(args.scale) * product;
            let next = greatest.max(score);
            let (old, new) = ((greatest - next).exp(), (score - next).exp());
            mass = mass * old + new;
            let value = token(cache.values, at);
            sums.iter_mut().zip(value).for_each(|(sum, v)| *sum = *sum * old + new * f64::from(*v));
            greatest = next;
        }
        for (out, sum) in output.iter_mut().zip(&sums) {
            *out = if mass > 0.0 { (sum / mass) as f32 } else { 0.0 };
        }
    }
}

unsafe extern "C" fn plain(host: *const abi::Host, arguments: *const c_void) -> i32 {
    guarded(|| {
        // SAFETY: the pointers are those of an attention variant's call.
        let (host, args) = unsafe { (&*host, &*arguments.cast::<abi::Attention>()) };
        if (args.size as usize) < ATTENTION {
            return Err(format!("arguments of {} bytes, expected {ATTENTION}", args.size));
        }
        let tasks = args.num_seqs * u64::from(args.num_heads);
        // SAFETY: this is the host's loop, and `attend` expects this context.
        unsafe { (host.parallel_for)(host.pool, tasks, attend, std::ptr::from_ref(args).cast_mut().cast()) };
        Ok(())
    })
}

unsafe extern "C" fn fails(_: *const abi::Host, _: *const c_void) -> i32 {
    guarded(|| Err("this variant always fails".into()))
}

unsafe extern "C" fn panics(_: *const abi::Host, _: *const c_void) -> i32 {
    guarded(|| panic!("this variant always panics"))
}

/// Constant data of the library.
struct Static<T>(T);
// SAFETY: the data is never written; its pointers refer to constants.
unsafe impl<T> Sync for Static<T> {}

const fn variant(operation: u32, name: &'static CStr, rank: u32, run: abi::Run) -> abi::Variant {
    abi::Variant {
        size: size_of::<abi::Variant>() as u32,
        operation,
        name: name.as_ptr(),
        device: c"cpu".as_ptr(),
        dtypes: 1,
        kv_dtypes: 1,
        layouts: 0b11,
        features: match MINOR {
            0 => abi::WINDOW,
            1 => abi::WINDOW | abi::SINKS,
            _ => abi::WINDOW | abi::SINKS | abi::BLOCK_SPARSE,
        },
        max_head_dim: 1024,
        head_dim_step: 1,
        max_block_size: 1024,
        block_size_step: 1,
        max_query_len: u64::MAX,
        row_invariant: c"example".as_ptr(),
        rank,
        reserved: 0,
        run,
    }
}

const PLAIN: &CStr = match (cfg!(feature = "name-taken"), MINOR) {
    (true, _) => c"cpu.reference",
    (false, 0) => c"example.version_1_0",
    (false, 1) => c"example.version_1_1",
    _ => c"example.plain",
};
static DECODE: Static<abi::Variant> = Static(variant(abi::DECODE, PLAIN, 1, plain));
static PREFILL: Static<abi::Variant> = Static(variant(abi::PREFILL, PLAIN, 1, plain));
static FAILS: Static<abi::Variant> = Static(variant(abi::DECODE, c"example.fails", 0, fails));
static PANICS: Static<abi::Variant> = Static(variant(abi::DECODE, c"example.panics", 0, panics));
// The first two are all that the libraries for older versions have.
static VARIANTS: Static<[*const abi::Variant; 4]> = Static([&DECODE.0, &PREFILL.0, &FAILS.0, &PANICS.0]);

static PLUGIN: Static<abi::Plugin> = Static(abi::Plugin {
    magic: abi::MAGIC,
    abi: if cfg!(feature = "other-abi") { abi::ABI + 1 } else { abi::ABI },
    size: size_of::<abi::Plugin>() as u32,
    name: c"example".as_ptr(),
    num_variants: if MINOR == abi::MINOR { 4 } else { 2 },
    variants: VARIANTS.0.as_ptr(),
    last_error,
});

/// Describes the plug-in to the host.
#[cfg_attr(not(feature = "no-symbol"), unsafe(no_mangle))]
pub extern "C" fn quire_kernels_plugin() -> *const abi::Plugin {
    &PLUGIN.0
}
