import sys, json, time, os, statistics, itertools, traceback
import torch, attemper
from torch.nn.attention import sdpa_kernel, SDPBackend
from attemper.methods import HardMask, Blur, DropKey
from attemper.ops.triton_attention import prepare, plan, library
from attemper.ops.triton_attention.plan import MaximaPlan
T0=time.time()
dev="cuda"; torch.manual_seed(0)
SH=[(512,12,65,32),(256,6,197,64),(64,12,577,64),(32,12,1024,64),(8,12,4096,64),(4,12,4096,128)]
if len(sys.argv)>1 and sys.argv[1]!="all": SH=[s for s in SH if f"{s[2]}x{s[3]}" in sys.argv[1].split(",")]
def graph(f):
    s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3): f()
    torch.cuda.current_stream().wait_stream(s)
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): f()
    return g
def times(gs, rounds=15):
    out={k:[] for k in gs}
    for g in gs.values(): g.replay()
    for _ in range(rounds):
        for k,g in gs.items():
            a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
            g.replay(); a.record(); g.replay(); g.replay(); b.record(); torch.cuda.synchronize(); out[k].append(a.elapsed_time(b)/2)
    return {k:statistics.median(v) for k,v in out.items()}
def check():
    for shape in ((2,3,65,32),(2,2,197,64),(1,2,577,64),(1,2,1100,64),(1,2,300,128)):
        for dt in (torch.bfloat16, torch.float32):
            q,k,v=(torch.randn(shape,device=dev,dtype=dt,requires_grad=True) for _ in range(3)); do=torch.randn(shape,device=dev,dtype=dt)
            ex=[t.detach().double().requires_grad_() for t in (q,k,v)]
            for m,impls in (([HardMask(0.4)],["triton"]),([HardMask(0.4,fill="neg_inf"),DropKey(.2)],["triton"]),([DropKey(.2),HardMask(0.4)],["triton"]),([Blur(2.0)],["triton","sdpa"]),([DropKey(.3,share="heads")],["gather"]),([DropKey(.3,share="queries")],["gather"])):
                hard=any(isinstance(x,HardMask) for x in m)
                base=[t.detach().float().requires_grad_() for t in (q,k,v)] if hard else ex
                o=attemper.attention(*base,methods=m,seed=5,impl="reference"); r=[o,*torch.autograd.grad(o,base,do.to(o.dtype))]
                for impl in impls:
                    o=attemper.attention(q,k,v,methods=m,seed=5,impl=impl); g=[o,*torch.autograd.grad(o,(q,k,v),do)]
                    e=[float((a.double()-b.double()).norm()/b.double().norm()) for a,b in zip(g,r)]
                    bad = max(e)>(2e-2 if dt==torch.bfloat16 else 2e-4)
                    if bad: print("BAD",shape,dt,m,impl,["%.1e"%x for x in e])
    print("checked", round(time.time()-T0))
try: pass
finally: pass
VAR={65:[(64,32,3,4,2),(32,32,3,4,2),(64,16,4,4,2),(64,64,2,4,2),(32,32,3,2,2)],
197:[(64,32,4,4,2),(32,32,4,4,2),(128,32,4,8,2),(64,64,4,4,2),(32,32,4,2,2)],
577:[(64,64,4,4,2),(64,32,4,4,2),(128,64,4,8,2),(64,64,3,4,2)],1024:[(64,64,4,4,2)],4096:[(64,64,4,4,2),(64,32,4,4,3),(128,64,4,8,2)]}
for shape in SH:
    try:
        q,k,v=(torch.randn(shape,device=dev,dtype=torch.bfloat16,requires_grad=True) for _ in range(3)); do=torch.randn_like(q)
        def fb(f): return lambda: torch.autograd.grad(f(),(q,k,v),do)
        def sdp(b):
            def f():
                with sdpa_kernel(b): return torch.nn.functional.scaled_dot_product_attention(q,k,v)
            return f
        gs={"cudnn":graph(fb(sdp(SDPBackend.CUDNN_ATTENTION)))}
        def ours(impl,*m): return lambda: attemper.attention(q,k,v,methods=list(m),impl=impl)
        for name,f in {"none":ours("triton"),"dropkey":ours("triton",DropKey(.1)),"hard":ours("triton",HardMask(.1)),"hardneg":ours("triton",HardMask(.1,fill="neg_inf")),"blur-t":ours("triton",Blur(1.0)),"blur-s":ours("sdpa",Blur(1.0)),"gather.3":ours("gather",DropKey(.3,share="heads")),"gatherq":ours("gather",DropKey(.3,share="queries"))}.items():
            try: gs[name]=graph(fb(f))
            except Exception as e: print(name,"FAIL",str(e)[:300])
        hard=prepare.drop_table(torch.tensor(5,device=dev),0,shape[2])
        W=len(gs)
        for var in VAR[shape[2]]:
            prepare.maxima_plan=lambda *a,var=var: MaximaPlan(*var)
            try: gs["cuts%s"%(var,)]=graph(lambda: prepare.row_cuts(q.detach(),k.detach(),None,None,None,hard,shape[3]**-.5,False,5,False))
            except Exception as e: print(var,"FAIL",str(e)[:200])
        prepare.maxima_plan=plan.maxima_plan
        t=times(gs); c=t["cudnn"]
        print(shape, "cudnn %.3f ms"%c, "|", "  ".join(f"{n} {x/c:.3f}" for n,x in list(t.items())[1:W])); print("     ", "  ".join(f"{n} {x/c:.3f}" for n,x in list(t.items())[W:]), round(time.time()-T0), flush=True)
        del gs; torch.cuda.empty_cache()
    except Exception: traceback.print_exc()
