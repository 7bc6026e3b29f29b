import torch, flashtile
from flashtile.distributed import attention
from flashtile.distributed.layouts import ranges
def cut(x, mesh, dim, lengths, layout):
    r = ranges(lengths, mesh.size(), mesh.get_local_rank(), layout)
    idx = torch.cat([torch.arange(a.start,a.stop,a.step) for a in r]) if r else torch.empty(0,dtype=torch.long)
    return x.index_select(dim, idx)
def simple(mesh):
    torch.manual_seed(0)
    S=48
    q,k,v=(torch.randn(2,S,4,16) for _ in range(3))
    found=[]
    for layout in ("zigzag","contiguous","striped"):
        for comm in ("ring","allgather"):
            local=[cut(x,mesh,1,(S,),layout).requires_grad_() for x in (q,k,v)]
            whole=[x.clone().requires_grad_() for x in (q,k,v)]
            out=attention(*local,mesh=mesh,layout=layout,comm=comm,causal=True)
            want=flashtile.attention(*whole,causal=True)
            d=torch.randn_like(want)
            g=torch.autograd.grad(out,local,cut(d,mesh,1,(S,),layout))
            gw=torch.autograd.grad(want,whole,d)
            found.append(tuple(round(float((a-cut(b,mesh,1,(S,),layout)).abs().max()),9) for a,b in zip((out,*g),(want,*gw))))
    return found
