//! Prints block tables as they fork, write, share a prefix and evict: `cargo run -p kvblock --example table`.

use std::error::Error;

use kvblock::{BlockId, BlockPool, BlockTable, MemOp, PoolConfig, Prompt};

/// Tokens are letters, so that a block can be read.
fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn prompt(tokens: &[u32]) -> Prompt<'_> {
    Prompt::new(tokens)
}

/// One line per table and one for the pool: `*` marks a cached block, `xN` one of N owners.
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
        match op {
            MemOp::Copy { src, dst } => println!("  order  copy {src} to {dst}"),
            MemOp::Poison { block, from_slot } => println!("  order  poison {block} from slot {from_slot}"),
            MemOp::SwapOut { src, dst } => println!("  order  copy {src} out to {dst}"),
            MemOp::SwapIn { src, dst } => println!("  order  copy {src} back to {dst}"),
            other => println!("  order  {other}"),
        }
    }
}

fn star(pool: &BlockPool, block: BlockId) -> &'static str {
    if pool.is_cached(block) { "*" } else { " " }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut pool = BlockPool::new(PoolConfig { poison: false, host_blocks: 8, ..PoolConfig::new(8, 4) })?;

    let text = tokens("paged memory");
    let mut a = pool.admit(prompt(&text)).open(0)?;
    pool.append(&mut a, &text)?;
    pool.commit(&mut a, text.len())?;
    show(&mut pool, "A is computed: its three full blocks can be found", &[("A", &a)]);

    pool.append(&mut a, &tokens("!?"))?;
    pool.commit(&mut a, 14)?;
    let mut b = pool.fork(&a)?;
    show(&mut pool, "A grows by two tokens, and B is forked: all is shared", &[("A", &a), ("B", &b)]);

    pool.append(&mut b, &tokens("b"))?;
    pool.commit(&mut b, 15)?;
    pool.append(&mut a, &tokens("a"))?;
    pool.commit(&mut a, 15)?;
    show(&mut pool, "Both write: B copies the shared tail first, A then owns it alone", &[("A", &a), ("B", &b)]);

    let mut away = vec![b];
    let mut swapped = pool.swap_out(&mut away)?;
    show(&mut pool, "B is swapped out", &[("A", &a)]);
    let b = pool.swap_in(&mut swapped, 0)?.remove(0);
    show(&mut pool, "B comes back: only what is not cached is copied", &[("A", &a), ("B", &b)]);

    pool.release(a);
    pool.release(b);
    show(&mut pool, "Both end: what has a hash stays findable, at the back", &[]);

    let text = tokens("paged tables");
    let admission = pool.admit(prompt(&text));
    println!(
        "\nC asks: {} of {} tokens are cached, miss {:?}",
        admission.cached_tokens(),
        text.len(),
        admission.miss()
    );
    let mut c = admission.open(0)?;
    let cached = c.len();
    pool.append(&mut c, &text[cached..])?;
    pool.commit(&mut c, text.len())?;
    show(&mut pool, "C shares the first block with what A left behind", &[("C", &c)]);

    let text = tokens("something else, long");
    let mut d = pool.admit(prompt(&text)).open(0)?;
    pool.append(&mut d, &text)?;
    pool.commit(&mut d, text.len())?;
    show(
        &mut pool,
        "D needs five blocks: the free ones first, then the tail of A's chain is evicted",
        &[("C", &c), ("D", &d)],
    );
    let text = tokens("paged memory?");
    let admission = pool.admit(prompt(&text));
    println!("\nA's prompt again: {} tokens are cached, miss {:?}", admission.cached_tokens(), admission.miss());

    pool.release(c);
    pool.release(d);
    Ok(())
}
