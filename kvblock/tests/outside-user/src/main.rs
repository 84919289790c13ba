//! A tiny engine that depends only on kvblock: a "model" in which the key of a token is the token itself, two requests
//! with a common prefix, and an attention that sums the slots of the block table.

use kvblock::{BlockPool, MemOp, PoolConfig, Prompt};

const BLOCK_SIZE: usize = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut pool = BlockPool::new(PoolConfig::new(16, BLOCK_SIZE))?;
    let mut keys = vec![f64::NAN; 16 * BLOCK_SIZE];
    let system: Vec<u32> = (1..=20).collect();
    let mut computed = 0;
    for question in [[100, 101], [200, 201]] {
        let tokens = [&system[..], &question].concat();
        let mut table = pool.admit(Prompt::new(&tokens)).open(0)?;
        let cached = table.len();
        pool.append(&mut table, &tokens[cached..])?;
        for op in pool.drain_memory_ops() {
            match op {
                MemOp::Copy { src, dst } => {
                    let from = src.index() * BLOCK_SIZE;
                    keys.copy_within(from..from + BLOCK_SIZE, dst.index() * BLOCK_SIZE);
                }
                MemOp::Poison { block, from_slot } => {
                    let start = block.index() * BLOCK_SIZE;
                    keys[start + from_slot..start + BLOCK_SIZE].fill(f64::NAN);
                }
                other => return Err(format!("{other}: expected no swap from a pool without host blocks").into()),
            }
        }
        let start = table.committed();
        for (token, slot) in tokens[start..].iter().zip(table.slots(start..tokens.len())) {
            keys[usize::try_from(slot)?] = f64::from(*token);
            computed += 1;
        }
        pool.commit(&mut table, tokens.len())?;
        let sum: f64 = table.slots(0..tokens.len()).map(|slot| keys[slot as usize]).sum();
        let expected: u32 = tokens.iter().sum();
        if sum != f64::from(expected) {
            return Err(format!("attention over the block table gives {sum}, expected {expected}").into());
        }
        pool.release(table);
    }
    pool.audit([])?;
    println!("computed {computed} of 44 tokens; {} came from the prefix cache", pool.stats().hit_tokens);
    Ok(())
}
