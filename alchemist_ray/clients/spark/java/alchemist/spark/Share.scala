package alchemist.spark

/** `width` neighbours from `first` on, again after each `period`. */
private[spark] final class Runs(val first: Long, val width: Long, val period: Long) {

  /** Those in a half-open interval: a part of a run, whole runs, a part of a run. */
  def spans(start: Long, stop: Long): List[Span] = {
    var head = first + Math.floorDiv(start - first, period) * period
    val begun = math.min(head + width, stop)
    val before = if (head < start && start < begun) {
      List(new Span(start, 1, begun - start, period))
    } else Nil
    if (head < start) head += period
    val whole = math.max(0, Math.floorDiv(stop - head - width, period) + 1)
    val rest = head + whole * period
    before ++
      (if (whole > 0) List(new Span(head, whole, width, period)) else Nil) ++
      (if (rest < stop) List(new Span(rest, 1, stop - rest, period)) else Nil)
  }

  /** How many of them are less than `stop`. */
  def count(stop: Long): Long = {
    val past = stop - first // more than -period
    if (past <= 0) 0 else past / period * width + math.min(past % period, width)
  }

  /** The place of an index among them, or -1. */
  def position(index: Long): Long = {
    val run = (index - first) / period
    val place = index - first - run * period
    if (index >= first && place < width) run * width + place else -1
  }

  def contains(index: Long): Boolean = Math.floorMod(index - first, period) < width
}

/** `runs` runs of `width` indices, the first at `start`. */
private[spark] final class Span(
    val start: Long, val runs: Long, val width: Long, val period: Long) {

  def size: Long = runs * width

  /** The same indices as one run, if no others are between its runs. */
  def joined: Span = if (width == period) new Span(start, 1, size, size) else this

  /** The same indices, at most `most` at a time. */
  def cut(most: Long): Seq[Span] =
    if (width > most) {
      for (k <- 0L until runs; offset <- 0L until width by most) yield
        new Span(start + k * period + offset, 1, math.min(most, width - offset), period)
    } else {
      val step = most / width
      for (k <- 0L until runs by step) yield
        new Span(start + k * period, math.min(step, runs - k), width, period)
    }
}

/** What the ranks of one node hold of a region, cut into the pieces in which it travels, by rows or
  * by columns.
  *
  * The same as `mpi_workers/matrix/node_shares.py`: both ends must cut alike. The session computes
  * the products of runs from the layout, so no layout is known here.
  */
private[spark] final class Share(
    node: Target.Node, region: Region, itemsize: Int, byRow: Boolean) {
  private val ROW_BYTES = 32 << 10 // as in node_shares.py

  private val slow0 = if (byRow) region.row0 else region.col0
  private val fast0 = if (byRow) region.col0 else region.row0

  private val products = for {
    (rows, cols) <- node.products
    some <- rows.spans(region.row0, region.row1)
    others <- cols.spans(region.col0, region.col1)
  } yield if (byRow) (some, others) else (others, some)

  val nbytes: Long = products.map { case (slow, fast) => slow.size * fast.size * itemsize }.sum

  /** Indices along the axis that travels slowly, and along the other. */
  private val pieces = products.flatMap { case (slow, fast) => cut(slow, fast) }

  /** Pieces of about `node.chunk` bytes; of rows, tiles: ranks store columns. */
  private def cut(slow: Span, fast: Span): Seq[(Span, Span)] = {
    val least = if (byRow) ROW_BYTES / itemsize else 1
    val across = math.max(least, node.chunk / (slow.size * itemsize))
    for {
      some <- fast.cut(math.max(1, across))
      others <- slow.cut(math.max(1, node.chunk / (some.size * itemsize)))
    } yield (others, some)
  }

  /** Send the share of a block of the region; its rows or columns have `stride` bytes. */
  def send(connection: Connection, block: Array[Byte], first: Int, stride: Long): Unit =
    walk(stride, (at, length) => connection.write(block, first + at, length))

  /** Fill a block of the region with the share; as `send`. */
  def receive(connection: Connection, block: Array[Byte], first: Int, stride: Long): Unit =
    walk(stride, (at, length) => connection.read(block, first + at, length))

  /** Visit the contiguous runs of all pieces in their order. */
  private def walk(stride: Long, copy: (Int, Int) => Unit): Unit =
    for ((slowly, quickly) <- pieces) {
      val slow = slowly.joined
      val fast = quickly.joined
      val length = (fast.width * itemsize).toInt
      var line = 0L
      while (line < slow.size) {
        val place = slow.start + line / slow.width * slow.period + line % slow.width - slow0
        var at = place * stride + (fast.start - fast0) * itemsize
        var run = 0L
        while (run < fast.runs) {
          copy(at.toInt, length)
          at += fast.period * itemsize
          run += 1
        }
        line += 1
      }
    }
}
