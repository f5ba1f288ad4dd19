// Norms, rotary embedding and elementwise ops.
#include "rootlet/dispatch.h"
#include "rootlet/elementwise.h"
#include "rootlet/math.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

void add_rows(const void* p, Worker& w) {
  const auto& a = *static_cast<const AddArgs*>(p);
  const Range r = w.share(a.rows.get());
  for (int t = r.begin; t < r.end; ++t) {
    const float* x = a.x + t * a.x_stride;
    const float* y = a.y + t * a.y_stride;
    float* out = a.out + static_cast<ptrdiff_t>(t) * a.n;
    for (int i = 0; i < a.n; i += 8) {
      const int n = a.n - i;
      if (n >= 8) {
        store(out + i, add(load(x + i), load(y + i)));
      } else {
        store_n(out + i, add(load_n(x + i, n), load_n(y + i, n)), n);
      }
    }
  }
}
ROOTLET_OP_AS("add", add_rows, add);

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
