//! Launches that are captured once and replayed with other lengths.

use attention_kernels::{
    AttentionArgs, CacheFormat, Dtype, KernelError, Operation, Workspace, WorkspaceLimits, variants,
};
use device::Buffer;
use trial::numbers::to_bytes;
use trial::{Look, Problem};

use super::devices::{self, buffer, bytes};

#[test]
fn one_graph_serves_contexts_of_any_length_with_one_row_and_with_several() {
    for device in devices::gpus(5) {
        for (name, rows, max_partials) in [
            ("cuda.paged_gqa", 1, 40),
            ("cuda.paged_gqa", 4, 40),
            ("cuda.paged_gqa", 16, usize::MAX),
            ("cuda.paged_v2", 2, usize::MAX),
        ] {
            let variant = variants(Operation::Decode).into_iter().find(|variant| variant.name == name).unwrap();
            let format = CacheFormat { dtype: Dtype::F16, ..CacheFormat::default() };
            let look = Look { heads: (6, 2), dim: 32, block_size: 16, ..Look::plain(format, vec![(rows, 1700); 4]) };
            let longest = Problem { query_gap: 0, ..Problem::new(3, &look) };
            let on_device = longest.on(&device).unwrap();
            let limits = WorkspaceLimits {
                max_seqs: 4,
                max_rows: 4 * rows,
                max_blocks: longest.batch.block_tables.longest(),
                num_blocks: longest.shape.num_blocks,
                block_size: longest.shape.block_size,
                num_heads: 6,
                head_dim: 32,
                max_partials,
                items_at_once: 0,
                max_copies: 0,
            };
            let mut workspace = Workspace::new(&*device, limits).unwrap();
            let query = buffer(&*device, &to_bytes(Dtype::F16, &longest.query));
            let mut output = on_device.output().unwrap();
            let attend = |problem: &Problem, workspace: &Workspace, output: &mut Buffer| -> Result<(), KernelError> {
                let args = AttentionArgs {
                    query: &query,
                    query_stride: 6 * 32,
                    num_heads: 6,
                    output,
                    lse: None,
                    cache: &on_device.cache,
                    batch: &problem.batch,
                    seqs: 0..4,
                    scale: problem.scale,
                    window: None,
                    soft_cap: None,
                    alibi_slopes: None,
                    sinks: None,
                    sparse: None,
                    workspace: Some(workspace),
                };
                variant.attention(&*device, args)
            };
            // Padding and short contexts first: the graph must not know how much there was to do.
            let mut graph = None;
            // Drafts of several lengths: as many rows in all, in other numbers for each sequence.
            let most = if rows == 1 { 1 } else { (rows + 2).min(16) };
            let uneven = [most, rows, rows, 2 * rows - most];
            let even = [rows; 4];
            for (lens, rows_of) in [
                ([0, 17, 0, 30], even),
                ([1700, 1700, 1700, 1700], uneven),
                ([600, 0, 1025, 512], even),
                ([513, 1024, 16, 1699], [uneven[3], uneven[1], uneven[2], uneven[0]]),
            ] {
                let mut problem = longest.clone();
                let sequences = lens.into_iter().zip(rows_of);
                let lens = sequences.map(|(len, rows)| if len == 0 { 0 } else { len.max(rows as u32) }).collect();
                problem.batch.context_lens = lens;
                problem.batch.query_starts = (0..=4).map(|seq| rows_of[..seq].iter().sum::<usize>() as u32).collect();
                workspace.set(&problem.batch, &[], None, Some(most)).unwrap();
                workspace.arrays().into_iter().try_for_each(|array| array.send(&*device)).unwrap();
                match &graph {
                    Some(graph) => device.replay(graph).unwrap(),
                    None => {
                        attend(&problem, &workspace, &mut output).unwrap();
                        let mut captured = Ok(());
                        let work = &mut || captured = attend(&problem, &workspace, &mut output);
                        graph = Some(device.capture(work).unwrap());
                        captured.unwrap();
                    }
                }
                let want = problem.on(&device).unwrap().run(variant, 0..4, false).unwrap();
                let lens = &problem.batch.context_lens;
                assert!(bytes(&*device, &output) == want.output, "{name}, rows {rows_of:?}, contexts {lens:?}");
            }
            // A launch that was captured for fewer rows would leave some uncomputed.
            let refused = workspace.set(&longest.batch, &[], None, Some(rows - 1));
            assert!(matches!(refused, Err(KernelError::Shape { .. })), "{name}: {refused:?}");
        }
    }
}
