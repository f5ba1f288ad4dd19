// The table of ops by instruction set, filled by static registration before main, and the choice among the sets.
#include "rootlet/dispatch.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

namespace rootlet {
namespace {

struct Isa {
  const char* name;
  bool (*usable)();
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__) && defined(__linux__)
constexpr unsigned long kHwcapDotProduct = 1ul << 20;  // HWCAP_ASIMDDP of the kernel's interface, which old C libraries do not name
bool has_dotprod() { return (getauxval(AT_HWCAP) & kHwcapDotProduct) != 0; }
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
bool has_dotprod() { return true; }  // the whole build asks for it
#elif defined(__aarch64__)
bool has_dotprod() { return false; }  // no portable way to ask
#endif

// Slowest first; "auto" takes the last one that is built and usable.
constexpr Isa kIsas[] = {
    {"scalar", always},
#if defined(__x86_64__)
    {"avx2", has_avx2},
    {"avx512", has_avx512},
#elif defined(__aarch64__)
    {"neon", always},
    {"dotprod", has_dotprod},
#endif
};

using OpTable = std::map<std::string, OpFn>;

std::map<std::string, OpTable>& tables() {
  static std::map<std::string, OpTable> t;
  return t;
}

const Isa* chosen = nullptr;
int version = 0;

bool usable(const Isa& isa) { return tables().count(isa.name) && isa.usable(); }

const Isa& current() {
  if (!chosen) force_isa("auto");
  return *chosen;
}

}  // namespace

void register_op(const char* isa, const char* name, OpFn fn) { tables()[isa][name] = fn; }

void force_isa(const char* name) {
  const Isa* found = nullptr;
  for (const Isa& isa : kIsas) {
    if (usable(isa) && (!strcmp(name, "auto") || !strcmp(name, isa.name))) found = &isa;
  }
  if (!found) throw std::invalid_argument(std::string("instruction set '") + name + "' is not usable here (usable: " + usable_isas() + ")");
  chosen = found;
  ++version;
}

const char* current_isa() { return current().name; }

const char* usable_isas() {
  static std::string names;
  names.clear();
  for (const Isa& isa : kIsas) {
    if (usable(isa)) names += (names.empty() ? "" : ",") + std::string(isa.name);
  }
  return names.c_str();
}

OpFn OpRef::fn() {
  const Isa& isa = current();
  if (!fn_ || version_ != version) {
    const OpTable& table = tables()[isa.name];
    auto it = table.find(name_);
    if (it == table.end()) throw std::invalid_argument(std::string("op '") + name_ + "' is not built for " + isa.name);
    fn_ = it->second;
    version_ = version;
  }
  return fn_;
}

}  // namespace rootlet
