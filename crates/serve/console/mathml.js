/** What the commands of LaTeX stand for, and how its parts are written in MathML. */

const MATHML = "http://www.w3.org/1998/Math/MathML";

export function math(name, attributes = {}, ...children) {
  const made = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) {
      made.setAttribute(key, value);
    }
  }
  made.append(...children);
  return made;
}

export const row = (nodes) => (nodes.length === 1 ? nodes[0] : math("mrow", {}, ...nodes));
export const letter = (text) => math("mi", {}, text);
export const operator = (text, attributes = {}) => math("mo", attributes, text);
const upright = (text) => math("mi", { mathvariant: "normal" }, text);

/** `name mark` pairs, by how they are set. */
const LETTERS =
  "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω ell ℓ imath ı jmath ȷ hbar ℏ";
const UPRIGHT =
  "Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇ emptyset ∅ varnothing ∅ Re ℜ Im ℑ aleph ℵ angle ∠ triangle △ square □ blacksquare ■ top ⊤ bot ⊥ degree ° prime ′ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ dotsc … dotsb ⋯ checkmark ✓ % % $ $ # # & & _ _";
const OPERATORS =
  "pm ± mp ∓ times × div ÷ cdot ⋅ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ ll ≪ gg ≫ leqslant ⩽ geqslant ⩾ approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ doteq ≐ in ∈ notin ∉ ni ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ cup ∪ cap ∩ setminus ∖ land ∧ wedge ∧ lor ∨ vee ∨ neg ¬ lnot ¬ forall ∀ exists ∃ nexists ∄ therefore ∴ because ∵ to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ Leftarrow ⇐ impliedby ⟸ Leftrightarrow ⇔ iff ⟺ mapsto ↦ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ hookrightarrow ↪ uparrow ↑ downarrow ↓ updownarrow ↕ rightleftharpoons ⇌ xrightarrow → mid ∣ nmid ∤ parallel ∥ perp ⊥ vdash ⊢ models ⊨ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lvert | rvert | vert | lVert ‖ rVert ‖ Vert ‖ lbrace { rbrace } { { } } | ‖ backslash ∖ colon : dagger † ddagger ‡ amalg ⨿ prec ≺ succ ≻ preceq ⪯ succeq ⪰ asymp ≍ coloneqq ≔ triangleq ≜ lbrack [ rbrack ]";
const LARGE_OPERATORS =
  "sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ oint ∮ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀";

export const SYMBOLS = Object.create(null);
for (const [text, make] of [[LETTERS, letter], [UPRIGHT, upright], [OPERATORS, operator], [LARGE_OPERATORS, (mark) => operator(mark, { largeop: "true" })]]) {
  const parts = text.split(" ");
  for (let at = 0; at < parts.length; at += 2) {
    SYMBOLS[parts[at]] = () => make(parts[at + 1]);
  }
}

/** What has its limits above and below; integrals have them at the side. */
export const LARGE = new Set(LARGE_OPERATORS.split(" ").filter((_, at) => at % 2 === 0).map((name) => `\\${name}`));

export const FUNCTIONS = new Set(
  "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan log ln lg exp det dim ker deg gcd lcm hom arg Pr lim max min sup inf limsup liminf argmax argmin tr rank mod".split(" "),
);

export const SPACES = { ",": "0.17em", ":": "0.22em", ">": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.3em", quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.17em" };

/** The mark, whether it grows with what it stands over, whether it stands below. */
export const ACCENTS = {
  hat: ["^", false], widehat: ["^", true], bar: ["¯", false], overline: ["‾", true], vec: ["→", false], tilde: ["~", false],
  widetilde: ["~", true], dot: ["˙", false], ddot: ["¨", false], check: ["ˇ", false], breve: ["˘", false], acute: ["´", false],
  grave: ["`", false], mathring: ["˚", false], overrightarrow: ["→", true], overleftarrow: ["←", true], underline: ["_", true, true],
};

/** Letters of the mathematical alphabets follow each other from these points on; a few stand elsewhere. */
const HOLES = {
  ℂ: [0x1d538, "C"], ℍ: [0x1d538, "H"], ℕ: [0x1d538, "N"], ℙ: [0x1d538, "P"], ℚ: [0x1d538, "Q"], ℝ: [0x1d538, "R"], ℤ: [0x1d538, "Z"],
  ℬ: [0x1d49c, "B"], ℰ: [0x1d49c, "E"], ℱ: [0x1d49c, "F"], ℋ: [0x1d49c, "H"], ℐ: [0x1d49c, "I"], ℒ: [0x1d49c, "L"], ℳ: [0x1d49c, "M"], ℛ: [0x1d49c, "R"],
  ℭ: [0x1d504, "C"], ℌ: [0x1d504, "H"], ℑ: [0x1d504, "I"], ℜ: [0x1d504, "R"], ℨ: [0x1d504, "Z"],
};
const SHIFTED = new Map(Object.entries(HOLES).map(([mark, [start, plain]]) => [`${start}${plain}`, mark]));

function alphabet(upper, lower, digits) {
  return (character) => {
    const found = SHIFTED.get(`${upper}${character}`);
    if (found) return found;
    const code = character.codePointAt(0);
    if (/^[A-Z]$/.test(character)) return String.fromCodePoint(upper + code - 65);
    if (/^[a-z]$/.test(character) && lower) return String.fromCodePoint(lower + code - 97);
    return /^\d$/.test(character) && digits ? String.fromCodePoint(digits + code - 48) : character;
  };
}

const plain = (character) => character;
const bold = alphabet(0x1d400, 0x1d41a, 0x1d7ce);
const blackboard = alphabet(0x1d538, 0x1d552, 0x1d7d8);
const script = alphabet(0x1d49c, null, null);
export const ALPHABETS = {
  mathbb: blackboard, mathbf: bold, boldsymbol: bold, bm: bold, mathcal: script, mathscr: script,
  mathfrak: alphabet(0x1d504, 0x1d51e, null), mathrm: plain, mathit: plain, mathsf: plain, mathtt: plain, rm: plain,
};

export const ENVIRONMENTS = {
  matrix: { columns: "middle" },
  smallmatrix: { columns: "middle" },
  pmatrix: { open: "(", close: ")", columns: "middle" },
  bmatrix: { open: "[", close: "]", columns: "middle" },
  Bmatrix: { open: "{", close: "}", columns: "middle" },
  vmatrix: { open: "|", close: "|", columns: "middle" },
  Vmatrix: { open: "‖", close: "‖", columns: "middle" },
  array: { columns: "middle", hasColumns: true },
  cases: { open: "{", columns: "left" },
  aligned: { columns: "aligned" },
  align: { columns: "aligned" },
  split: { columns: "aligned" },
  equation: { columns: "middle" },
  gather: { columns: "middle" },
  gathered: { columns: "middle" },
};
