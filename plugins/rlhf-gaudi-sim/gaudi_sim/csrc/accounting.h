// What a Gaudi would compile. In lazy mode, operators between two boundaries form a graph, and an unseen one is
// compiled. In eager mode torch.compile makes the graphs, and other operators are launched one by one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "device.h"

namespace gaudi_sim {

struct Counts {
  int64_t compilations = 0;
  int64_t hits = 0;
  int64_t breaks = 0;
  int64_t operators = 0;
  int64_t graphs = 0;
  int64_t mixed = 0;
  int64_t single = 0;  // operators that eager mode launched one by one
};

struct Event {
  const char* kind;
  std::string tag;
  std::string line;
  int64_t operators;
  std::string difference;
  double time;  // seconds since 1970
  bool in_step;
};

// How an operator is reported: its name, and its operands as text.
struct Form {
  std::string name;
  std::string operands;
};

// What an operator is in the key of its graph. Tensors are told apart by the order in which their bytes first appear.
class Signature {
 public:
  explicit Signature(uint64_t name) : form_(name) {}

  void add(uint64_t value) {
    form_ = mixed(form_, value);
  }
  void add(const at::Tensor& tensor);

  uint64_t form() const {
    return form_;
  }
  uint64_t key() const {
    return mixed(form_, tensors_);
  }

  static uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 29);
  }

 private:
  uint64_t form_;         // the operator, shapes, dtypes, layouts, numbers
  uint64_t tensors_ = 1;  // which tensors
};

// `describe` is called when an operator is first seen in this form.
void add_operator(const Signature& signature, const std::function<Form()>& describe);

// Numbers a result, so that it is not taken for an input where it is used.
void add_result(const at::Tensor& tensor);

// A step of training or scoring. In a strict one, what a Gaudi run should not do is an error: mixed devices, float64,
// host reads.
void enter_step(bool strict);
void leave_step();
bool is_in_step();
bool is_strict();

void end_graph(const std::string& tag);

// Eager mode: no graphs of operators.
void set_eager();

// Eager mode: a graph that torch.compile made, of so many operators, and a run of one.
void compiled(const std::string& tag, const std::string& line, int64_t operators, const std::string& difference);
void enter_compiled();
void leave_compiled();

// A break: `what` read values at `line`.
void host_read(const std::string& what, uint32_t line);

// Whether the current graph has operators that a host read would have to wait for.
bool operators_wait();

// A recording of so many operators ran.
void replayed(int64_t operators);

void count_mixed();

Counts counts();
std::vector<Event> events();
void reset_accounts();

}  // namespace gaudi_sim
