//! temp
use sched::*;
use std::time::Instant;
#[test]
fn zz() {
    let mut s = Scheduler::new(SchedConfig{block_size:16,num_blocks:40_000,max_num_seqs:256,max_num_batched_tokens:8192,max_model_len:8192,enable_prefix_caching:true,enable_chunked_prefill:true,policy:Policy::Fcfs,hash_seed:None}).unwrap();
    for i in 0..300u64 { s.submit(Request{id:RequestId(i),prompt:(0..1000).map(|t| t+ i as u32*7919).collect(),n:1,max_tokens:1500,priority:0,cache_salt:None,read_prefix_cache:true}).unwrap(); }
    let (mut tp,mut tc,mut n)=(0u128,0u128,0);
    for step in 0..600 {
        let a=Instant::now(); let p=s.plan(); let b=Instant::now();
        let o:Vec<Outcome>=p.spans.iter().flat_map(|s| s.sample.clone().map(|index| Outcome{seq:SeqId{index,..s.seq},tokens:vec![step],finished:false})).collect();
        let c=Instant::now(); s.commit(p.step,&o).unwrap(); let d=Instant::now();
        if p.spans.len()==256 && p.num_tokens()==256 { tp+=(b-a).as_nanos(); tc+=(d-c).as_nanos(); n+=1; }
    }
    eprintln!("steps {n} plan {} us commit {} us", tp/n/1000, tc/n/1000);
}
