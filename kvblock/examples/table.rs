//! Prints block tables as they fork, write, share a prefix and evict: `cargo run -p kvblock --example table`.

use std::error::Error;

use kvblock::{BlockId, BlockPool, BlockTable, MemOp, PoolConfig, Prompt};

/// Tokens are letters, so that blocks are readable.
fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Prints a line per table and one for the pool: `*` marks a cached block, `xN` one with N owners.
fn show(pool: &mut BlockPool, what: &str, tables: &[(&str, &BlockTable)]) {
    println!("\n{what}");
    for (name, table) in tables {
        let cells = table.blocks().iter().zip(table.tokens().chunks(pool.block_size())).map(|(block, tokens)| {
            let text: String = tokens.iter().filter_map(|t| char::from_u32(*t)).collect();
            let owners = pool.references(*block);
            let shared = if owners > 1 { format!("x{owners}") } else { String::new() };
            format!("{:>2}{}{shared:<2} [{text:<4}]", block.0, star(pool, *block))
        });
        println!("  {name:<7}{}", cells.collect::<Vec<_>>().join("  "));
    }
    let free: Vec<String> = pool.free_blocks().map(|b| format!("{}{}", b.0, star(pool, b).trim())).collect();
    let gauges = pool.gauges();
    println!("  free   {} ({} in use, {} cached, {} free)", free.join(" "), gauges.in_use, gauges.cached, gauges.free);
    let ops: Vec<MemOp> = pool.drain_memory_ops().collect();
    for op in ops {
        println!("  op     {op}");
    }
}

fn star(pool: &BlockPool, block: BlockId) -> &'static str {
    if pool.is_cached(block) { "*" } else { " " }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut pool = BlockPool::new(PoolConfig { poison: false, host_blocks: 8, ..PoolConfig::new(8, 4) })?;

    let text = tokens("paged memory");
    let mut a = pool.admit(Prompt::new(&text)).open(0)?;
    pool.append(&mut a, &text)?;
    pool.commit(&mut a, text.len())?;
    show(&mut pool, "A is computed: its three full blocks are cached", &[("A", &a)]);

    pool.append(&mut a, &tokens("!?"))?;
    pool.commit(&mut a, 14)?;
    let mut b = pool.fork(&a)?;
    show(&mut pool, "A appends two tokens, and B is forked: all blocks are shared", &[("A", &a), ("B", &b)]);

    pool.append(&mut b, &tokens("b"))?;
    pool.commit(&mut b, 15)?;
    pool.append(&mut a, &tokens("a"))?;
    pool.commit(&mut a, 15)?;
    show(&mut pool, "Both append: B copies the shared last block, then A is its sole owner", &[("A", &a), ("B", &b)]);

    let mut swapped = pool.swap_out(&mut vec![b])?;
    show(&mut pool, "B is swapped out", &[("A", &a)]);
    let b = pool.swap_in(&mut swapped, 0)?.remove(0);
    show(&mut pool, "B is swapped in: only blocks that are not cached are copied", &[("A", &a), ("B", &b)]);

    pool.release(a);
    pool.release(b);
    show(&mut pool, "Both are released: cached blocks go to the back of the free list", &[]);

    let text = tokens("paged tables");
    let admission = pool.admit(Prompt::new(&text));
    println!(
        "\nC is looked up: {} of {} tokens are cached, miss {:?}",
        admission.cached_tokens(),
        text.len(),
        admission.miss()
    );
    let mut c = admission.open(0)?;
    let cached = c.len();
    pool.append(&mut c, &text[cached..])?;
    pool.commit(&mut c, text.len())?;
    show(&mut pool, "C shares the first block that A computed", &[("C", &c)]);

    let text = tokens("something else, long");
    let mut d = pool.admit(Prompt::new(&text)).open(0)?;
    pool.append(&mut d, &text)?;
    pool.commit(&mut d, text.len())?;
    show(
        &mut pool,
        "D needs five blocks: those without contents first, then the end of A is evicted",
        &[("C", &c), ("D", &d)],
    );
    let text = tokens("paged memory?");
    let admission = pool.admit(Prompt::new(&text));
    println!("\nA is looked up again: {} tokens are cached, miss {:?}", admission.cached_tokens(), admission.miss());

    pool.release(c);
    pool.release(d);
    Ok(())
}
