//! Rewrites a template so that every operation whose cost depends on data goes through a charged function.
//!
//! The template engine has no hook for its operators: `x ~ x` in a loop makes a terabyte in forty instructions. So a
//! template is parsed, and written out again with `+`, `~` and `*` as calls, operands of comparisons and subscripts
//! weighed, and raw text emitted through the formatter. The result means the same and is compiled instead of the
//! original. Statements that load other templates are refused: a chat template stands alone.
//!
//! No crate does this. `minijinja`'s own fuel counts instructions, not what they cost, and templates come from model files, which
//! anyone can upload.

use std::fmt::Write as _;

use minijinja::machinery::ast::{
    BinOp, BinOpKind, Call, CallArg, CompareOpKind, Expr, Filter, ForLoop, IfCond, Macro, Stmt, UnaryOpKind,
};
use minijinja::value::{Value, ValueKind};

/// Prefix of the functions and filters that rewritten templates call. Templates must not use it themselves.
pub(super) const PREFIX: &str = "__baton_";

/// A rewritten template: its source and the texts and constants it refers to by number.
#[derive(Debug, Default)]
pub(super) struct Rewritten {
    pub(super) source: String,
    pub(super) constants: Vec<Value>,
}

/// Why a template cannot be rewritten.
type Refused = String;

impl Rewritten {
    pub(super) fn from_ast(template: &Stmt<'_>) -> Result<Self, Refused> {
        let mut rewritten = Self::default();
        rewritten.statement(template)?;
        Ok(rewritten)
    }

    fn put(&mut self, text: &str) {
        self.source.push_str(text);
    }

    fn statements(&mut self, statements: &[Stmt<'_>]) -> Result<(), Refused> {
        statements.iter().try_for_each(|statement| self.statement(statement))
    }

    fn block(&mut self, body: &[Stmt<'_>], end: &str) -> Result<(), Refused> {
        self.put(" %}");
        self.statements(body)?;
        self.put("{% ");
        self.put(end);
        self.put(" %}");
        Ok(())
    }

    fn statement(&mut self, statement: &Stmt<'_>) -> Result<(), Refused> {
        match statement {
            Stmt::Template(template) => self.statements(&template.children)?,
            Stmt::EmitExpr(emit) => {
                self.put("{{ ");
                self.expression(&emit.expr)?;
                self.put(" }}");
            }
            Stmt::EmitRaw(raw) => {
                if !raw.raw.is_empty() {
                    self.put("{{ ");
                    self.constant(Value::from(raw.raw));
                    self.put(" }}");
                }
            }
            Stmt::ForLoop(node) => self.for_loop(node)?,
            Stmt::IfCond(node) => self.condition(node)?,
            Stmt::WithBlock(node) => {
                self.put("{% with ");
                for (index, (target, value)) in node.assignments.iter().enumerate() {
                    self.put(if index > 0 { ", " } else { "" });
                    self.target(target)?;
                    self.put(" = ");
                    self.expression(value)?;
                }
                self.block(&node.body, "endwith")?;
            }
            Stmt::Set(node) => {
                self.put("{% set ");
                self.target(&node.target)?;
                self.put(" = ");
                self.expression(&node.expr)?;
                self.put(" %}");
            }
            Stmt::SetBlock(node) => {
                self.put("{% set ");
                self.target(&node.target)?;
                if let Some(filter) = &node.filter {
                    self.put(" | ");
                    self.filter_chain(filter)?;
                }
                self.block(&node.body, "endset")?;
            }
            Stmt::FilterBlock(node) => {
                self.put("{% filter ");
                self.filter_chain(&node.filter)?;
                self.block(&node.body, "endfilter")?;
            }
            Stmt::Macro(node) => {
                self.put("{% macro ");
                self.name(node.name)?;
                self.parameters(node)?;
                self.block(&node.body, "endmacro")?;
            }
            Stmt::CallBlock(node) => {
                self.put("{% call");
                self.parameters(&node.macro_decl)?;
                self.put(" ");
                self.call(&node.call)?;
                self.block(&node.macro_decl.body, "endcall")?;
            }
            Stmt::Continue(_) => self.put("{% continue %}"),
            Stmt::Break(_) => self.put("{% break %}"),
            Stmt::Do(node) => {
                self.put("{% do ");
                self.call(&node.call)?;
                self.put(" %}");
            }
            Stmt::AutoEscape(_) => return Err("autoescape has no place in a chat template".to_owned()),
            Stmt::Block(_) | Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
                return Err("a chat template cannot load or extend other templates".to_owned());
            }
        }
        Ok(())
    }

    fn for_loop(&mut self, node: &ForLoop<'_>) -> Result<(), Refused> {
        self.put("{% for ");
        self.target(&node.target)?;
        self.put(" in ");
        // Constants need no charge, but the one that cannot be iterated over is found there as well.
        if matches!(&node.iter, Expr::Const(constant) if constant.value.is_none()) {
            self.put("(none|__baton_iterate)");
        } else {
            self.charged(&node.iter, "iterate")?;
        }
        if let Some(condition) = &node.filter_expr {
            self.put(" if ");
            self.expression(condition)?;
        }
        self.put(if node.recursive { " recursive %}" } else { " %}" });
        self.statements(&node.body)?;
        if !node.else_body.is_empty() {
            self.put("{% else %}");
            self.statements(&node.else_body)?;
        }
        self.put("{% endfor %}");
        Ok(())
    }

    /// `elif` is written as such: as nested conditions a long chain would exceed the parser's depth.
    fn condition(&mut self, node: &IfCond<'_>) -> Result<(), Refused> {
        self.put("{% if ");
        let mut node = node;
        loop {
            self.expression(&node.expr)?;
            self.put(" %}");
            self.statements(&node.true_body)?;
            match node.false_body.as_slice() {
                [Stmt::IfCond(next)] => {
                    self.put("{% elif ");
                    node = next;
                }
                [] => break,
                otherwise => {
                    self.put("{% else %}");
                    self.statements(otherwise)?;
                    break;
                }
            }
        }
        self.put("{% endif %}");
        Ok(())
    }

    fn parameters(&mut self, node: &Macro<'_>) -> Result<(), Refused> {
        self.put("(");
        let first_default = node.args.len().saturating_sub(node.defaults.len());
        for (index, argument) in node.args.iter().enumerate() {
            self.put(if index > 0 { ", " } else { "" });
            self.target(argument)?;
            if let Some(default) = index.checked_sub(first_default).and_then(|index| node.defaults.get(index))
            {
                self.put("=");
                self.expression(default)?;
            }
        }
        self.put(")");
        Ok(())
    }

    fn name(&mut self, name: &str) -> Result<(), Refused> {
        if name.starts_with(PREFIX) {
            return Err(format!("names that begin with {PREFIX} are reserved"));
        }
        self.put(name);
        Ok(())
    }

    /// The left side of an assignment.
    fn target(&mut self, target: &Expr<'_>) -> Result<(), Refused> {
        match target {
            Expr::Var(variable) => self.name(variable.id),
            Expr::GetAttr(attribute) => {
                self.target(&attribute.expr)?;
                self.put(".");
                self.name(attribute.name)
            }
            Expr::List(list) => self.targets(&list.items),
            Expr::Tuple(tuple) => self.targets(&tuple.items),
            other => Err(format!("cannot assign to a {}", other.description())),
        }
    }

    fn targets(&mut self, targets: &[Expr<'_>]) -> Result<(), Refused> {
        self.put("(");
        for target in targets {
            self.target(target)?;
            self.put(", ");
        }
        self.put(")");
        Ok(())
    }

    /// A constant by its number; the function is known to the environment of this template only.
    fn constant(&mut self, value: Value) {
        write!(self.source, "{PREFIX}constant({})", self.constants.len()).expect("writing to a string");
        self.constants.push(value);
    }

    fn literal(&mut self, value: &Value) {
        match value.kind() {
            ValueKind::None => self.put("none"),
            ValueKind::Bool => self.put(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.as_i64().is_some_and(|number| number >= 0) && value.is_integer() => {
                write!(self.source, "{value}").expect("writing to a string");
            }
            ValueKind::String => {
                let text = value.as_str().unwrap_or_default();
                self.put("\"");
                for character in text.chars() {
                    match character {
                        '"' => self.put("\\\""),
                        '\\' => self.put("\\\\"),
                        '\n' => self.put("\\n"),
                        '\r' => self.put("\\r"),
                        other => self.source.push(other),
                    }
                }
                self.put("\"");
            }
            _ => self.constant(value.clone()),
        }
    }

    /// An expression whose size is charged when it is evaluated; constants need not be.
    fn charged(&mut self, expression: &Expr<'_>, how: &str) -> Result<(), Refused> {
        if matches!(expression, Expr::Const(_)) {
            return self.expression(expression);
        }
        self.put("(");
        self.expression(expression)?;
        write!(self.source, "|{PREFIX}{how})").expect("writing to a string");
        Ok(())
    }

    fn expression(&mut self, expression: &Expr<'_>) -> Result<(), Refused> {
        match expression {
            Expr::Var(variable) => self.name(variable.id)?,
            Expr::Const(constant) => self.literal(&constant.value),
            Expr::Slice(slice) => {
                self.put("__baton_slice(");
                self.expression(&slice.expr)?;
                for part in [&slice.start, &slice.stop, &slice.step] {
                    self.put(", ");
                    match part {
                        Some(part) => self.expression(part)?,
                        None => self.put("none"),
                    }
                }
                self.put(")");
            }
            Expr::UnaryOp(node) => {
                self.put(match node.op {
                    UnaryOpKind::Not => "(not ",
                    UnaryOpKind::Neg => "(-",
                });
                self.expression(&node.expr)?;
                self.put(")");
            }
            Expr::BinOp(node) => self.operation(node)?,
            Expr::Compare(node) => {
                self.put("(");
                self.charged(&node.expr, "weigh")?;
                for part in &node.ops {
                    self.put(comparison(part.op));
                    self.charged(&part.expr, "weigh")?;
                }
                self.put(")");
            }
            Expr::IfExpr(node) => {
                self.put("(");
                self.expression(&node.true_expr)?;
                self.put(" if ");
                self.expression(&node.test_expr)?;
                if let Some(otherwise) = &node.false_expr {
                    self.put(" else ");
                    self.expression(otherwise)?;
                }
                self.put(")");
            }
            Expr::Filter(node) => self.filter(node)?,
            Expr::Test(node) => {
                self.put("(");
                self.expression(&node.expr)?;
                self.put(" is ");
                self.put(node.name);
                self.arguments(&node.args)?;
                self.put(")");
            }
            Expr::GetAttr(node) => {
                self.expression(&node.expr)?;
                self.put(".");
                self.put(node.name);
            }
            Expr::GetItem(node) => {
                self.charged(&node.expr, "touch_text")?;
                self.put("[");
                self.charged(&node.subscript_expr, "touch_text")?;
                self.put("]");
            }
            Expr::Call(call) => self.call(call)?,
            Expr::List(list) => self.items("[", &list.items, "]")?,
            Expr::Tuple(tuple) => self.items("(", &tuple.items, ",)")?,
            Expr::Map(map) => {
                self.put("{");
                for (key, value) in map.keys.iter().zip(&map.values) {
                    self.charged(key, "touch_text")?;
                    self.put(": ");
                    self.expression(value)?;
                    self.put(", ");
                }
                self.put("}");
            }
        }
        Ok(())
    }

    fn items(&mut self, open: &str, items: &[Expr<'_>], close: &str) -> Result<(), Refused> {
        self.put(open);
        for (index, item) in items.iter().enumerate() {
            self.put(if index > 0 { ", " } else { "" });
            self.expression(item)?;
        }
        // An empty tuple is `()`: the comma of `close` is for one item.
        self.put(if items.is_empty() { close.trim_start_matches(',') } else { close });
        Ok(())
    }

    /// Chains of one operator become one call or one flat line, so that long ones do not nest.
    fn operation(&mut self, node: &BinOp<'_>) -> Result<(), Refused> {
        let same = |op: BinOpKind| std::mem::discriminant(&op) == std::mem::discriminant(&node.op);
        let mut operands = vec![&node.right];
        let mut left = &node.left;
        while let Expr::BinOp(inner) = left
            && same(inner.op)
        {
            operands.push(&inner.right);
            left = &inner.left;
        }
        operands.push(left);
        operands.reverse();
        let (open, separator) = match node.op {
            BinOpKind::Add => ("__baton_add(", ", "),
            BinOpKind::Concat => ("__baton_concat(", ", "),
            BinOpKind::Mul => ("__baton_multiply(", ", "),
            BinOpKind::ScAnd => ("(", " and "),
            BinOpKind::ScOr => ("(", " or "),
            BinOpKind::Sub | BinOpKind::Eq | BinOpKind::Ne | BinOpKind::In => {
                return self.plain_operation(node);
            }
            _ => return self.binary_call(node),
        };
        self.put(open);
        for (index, operand) in operands.into_iter().enumerate() {
            self.put(if index > 0 { separator } else { "" });
            self.expression(operand)?;
        }
        self.put(")");
        Ok(())
    }

    fn binary_call(&mut self, node: &BinOp<'_>) -> Result<(), Refused> {
        self.put(match node.op {
            BinOpKind::Rem => "__baton_remainder(",
            BinOpKind::FloorDiv => "__baton_floor_divide(",
            BinOpKind::Div => "__baton_divide(",
            // Python orders only what is alike.
            BinOpKind::Lt => "__baton_order(\"<\", ",
            BinOpKind::Lte => "__baton_order(\"<=\", ",
            BinOpKind::Gt => "__baton_order(\">\", ",
            BinOpKind::Gte => "__baton_order(\">=\", ",
            _ => "__baton_power(",
        });
        self.expression(&node.left)?;
        self.put(", ");
        self.expression(&node.right)?;
        self.put(")");
        Ok(())
    }

    fn plain_operation(&mut self, node: &BinOp<'_>) -> Result<(), Refused> {
        let operator = match node.op {
            BinOpKind::Sub => " - ",
            BinOpKind::Eq => " == ",
            BinOpKind::Ne => " != ",
            BinOpKind::In => " in ",
            _ => unreachable!("written as chains or calls"),
        };
        self.put("(");
        self.charged(&node.left, "weigh")?;
        self.put(operator);
        self.charged(&node.right, "weigh")?;
        self.put(")");
        Ok(())
    }

    fn filter(&mut self, node: &Filter<'_>) -> Result<(), Refused> {
        self.put("(");
        if let Some(expression) = &node.expr {
            self.expression(expression)?;
            self.put("|");
        }
        self.name(node.name)?;
        self.arguments(&node.args)?;
        self.put(")");
        Ok(())
    }

    /// The filters of a block, without the value they are applied to.
    fn filter_chain(&mut self, filter: &Expr<'_>) -> Result<(), Refused> {
        let Expr::Filter(node) = filter else { return Err("a block needs a filter".to_owned()) };
        if let Some(inner) = &node.expr {
            self.filter_chain(inner)?;
            self.put(" | ");
        }
        self.name(node.name)?;
        self.arguments(&node.args)
    }

    fn call(&mut self, call: &Call<'_>) -> Result<(), Refused> {
        self.expression(&call.expr)?;
        if call.args.is_empty() {
            self.put("()");
            return Ok(());
        }
        self.arguments(&call.args)
    }

    fn arguments(&mut self, arguments: &[CallArg<'_>]) -> Result<(), Refused> {
        if arguments.is_empty() {
            return Ok(());
        }
        self.put("(");
        for (index, argument) in arguments.iter().enumerate() {
            self.put(if index > 0 { ", " } else { "" });
            match argument {
                CallArg::Pos(value) => self.expression(value)?,
                CallArg::Kwarg(name, value) => {
                    self.name(name)?;
                    self.put("=");
                    self.expression(value)?;
                }
                CallArg::PosSplat(value) => {
                    self.put("*");
                    self.charged(value, "touch")?;
                }
                CallArg::KwargSplat(value) => {
                    self.put("**");
                    self.charged(value, "touch")?;
                }
            }
        }
        self.put(")");
        Ok(())
    }
}

fn comparison(operator: CompareOpKind) -> &'static str {
    match operator {
        CompareOpKind::Eq => " == ",
        CompareOpKind::Ne => " != ",
        CompareOpKind::Lt => " < ",
        CompareOpKind::Lte => " <= ",
        CompareOpKind::Gt => " > ",
        CompareOpKind::Gte => " >= ",
        CompareOpKind::In => " in ",
        CompareOpKind::NotIn => " not in ",
    }
}
