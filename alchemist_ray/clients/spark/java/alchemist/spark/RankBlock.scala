package alchemist.spark

import java.io.{Closeable, IOException}

import org.apache.spark.unsafe.Platform

/** One rank's block of a matrix in this process's memory. It is stored by columns. Rows that are read
  * or written have the `chosen` columns of the matrix.
  *
  * Loops are written out, because they take most of the time of a transfer.
  */
private[spark] final class RankBlock(
    target: Target, held: Target.Held, chosen: Array[Int], path: String, nbytes: Long)
    extends Closeable {
  val rank: Int = held.rank

  /** Elements. */
  var written = 0L

  private val rows = held.rows
  private val itemsize = target.element.nbytes
  private val height = rows.count(target.rows)
  private val places = // of the matrix's columns in the block, or -1
    Array.range(0, target.cols).map(col => held.cols.position(col).toInt)
  private val here = chosen.indices.filter(k => places(chosen(k)) >= 0).toArray
  private val columns = here.map(k => places(chosen(k))) // their places in the block
  private val columnFrom = here.map(_ * itemsize) // and their first bytes in a row
  if (height * held.cols.count(target.cols) * itemsize > nbytes) {
    throw new IOException(s"rank $rank has $nbytes bytes for its block")
  }
  private var segment = Segment.open(path, nbytes) // null: closed

  /** Some rows of the matrix: those that this rank has are found once for all columns. A column
    * begins `offset` bytes before them in an array.
    */
  final class Part(row: Long, count: Int, offset: Int) {
    private val start = rows.count(row)
    private val some = rows.count(row + count) - start
    private val spans = rows.spans(row, row + count).map(_.joined).toArray

    private def has(col: Long): Boolean = some > 0 && places(col.toInt) >= 0

    private def address(col: Long): Long =
      segment.address((places(col.toInt) * height + start) * itemsize, some * itemsize)

    /** The first element's byte in an array, in which the column begins at `first`. */
    private def at(first: Int, array: Array[Byte]): Long = {
      if (first < 0 || first + offset.toLong > array.length - count.toLong * itemsize) {
        throw new IndexOutOfBoundsException(s"$count elements at $first")
      }
      Block.BASE + first + offset
    }

    /** Write the elements of this rank of a column, of which each element is given. */
    def put(col: Long, stored: Array[Byte], first: Int): Unit = if (has(col)) {
      val base = at(first, stored)
      var to = address(col)
      var s = 0
      while (s < spans.length) {
        val runs = spans(s)
        val from = base + (runs.start - row) * itemsize
        if (runs.width == 1) {
          gather(stored, from, runs.period * itemsize, to, runs.runs.toInt)
        } else {
          var k = 0L
          while (k < runs.runs) {
            Platform.copyMemory(
              stored, from + k * runs.period * itemsize,
              null, to + k * runs.width * itemsize, runs.width * itemsize)
            k += 1
          }
        }
        to += runs.size * itemsize
        s += 1
      }
      written += some
    }

    /** Read the elements of this rank of a column, each to its place. */
    def get(col: Long, into: Array[Byte], first: Int): Unit = if (has(col)) {
      val base = at(first, into)
      var from = address(col)
      for (runs <- spans) {
        val nbytes = runs.width * itemsize
        var k = 0L
        while (k < runs.runs) {
          val to = base + (runs.start + k * runs.period - row) * itemsize
          if (runs.width == 1) copy(null, from, into, to)
          else Platform.copyMemory(null, from, into, to, nbytes)
          from += nbytes
          k += 1
        }
      }
    }
  }

  /** A part of a column, which begins `start` rows after the first one in an array. */
  def part(row: Long, start: Int, count: Int): Part = new Part(row + start, count, start * itemsize)

  private def gather(stored: Array[Byte], first: Long, step: Long, place: Long, count: Int): Unit = {
    var from = first
    var to = place
    var k = 0
    if (itemsize == 8) {
      while (k < count) {
        Platform.putLong(null, to, Platform.getLong(stored, from))
        from += step
        to += 8
        k += 1
      }
    }
    while (k < count) {
      copy(stored, from, null, to)
      from += step
      to += itemsize
      k += 1
    }
  }

  /** Copy an element. */
  private def copy(source: Array[Byte], from: Long, into: Array[Byte], to: Long): Unit =
    itemsize match {
      case 8 => Platform.putLong(into, to, Platform.getLong(source, from))
      case 4 => Platform.putInt(into, to, Platform.getInt(source, from))
      case _ => Platform.putByte(into, to, Platform.getByte(source, from))
    }

  /** Write the elements of this rank of whole rows, in any order. */
  def putRows(stored: Array[Byte], rowBytes: Int, numbers: Array[Long], count: Int): Unit = {
    if (rowBytes * count.toLong > stored.length) {
      throw new IndexOutOfBoundsException(s"$count rows of $rowBytes bytes")
    }
    val from = new Array[Int](count)
    val to = new Array[Long](count)
    var some = 0
    var k = 0
    while (k < count) {
      val place = rows.position(numbers(k))
      if (place >= 0) {
        from(some) = k * rowBytes
        to(some) = place * itemsize
        some += 1
      }
      k += 1
    }
    var start = 0
    while (start < some) { // rows that have one address
      var low = to(start)
      var high = low
      var stop = start + 1
      while (stop < some &&
          math.max(high, to(stop)) - math.min(low, to(stop)) + itemsize <= Segment.MOST) {
        low = math.min(low, to(stop))
        high = math.max(high, to(stop))
        stop += 1
      }
      k = start
      while (k < stop) {
        to(k) -= low
        k += 1
      }
      putRows(stored, from, to, start, stop, low, high + itemsize - low)
      start = stop
    }
    written += some.toLong * columnFrom.length
  }

  private def putRows(
      stored: Array[Byte], from: Array[Int], to: Array[Long], start: Int, stop: Int, low: Long,
      length: Long): Unit = {
    var col = 0
    while (itemsize == 8 && col + 4 <= columnFrom.length) { // of one cache line, if neighbours
      val a = column(col, low, length)
      val b = column(col + 1, low, length)
      val c = column(col + 2, low, length)
      val d = column(col + 3, low, length)
      val fromA = Block.BASE + columnFrom(col)
      val fromB = Block.BASE + columnFrom(col + 1)
      val fromC = Block.BASE + columnFrom(col + 2)
      val fromD = Block.BASE + columnFrom(col + 3)
      var k = start
      while (k < stop) {
        val row = from(k)
        val place = to(k)
        Platform.putLong(null, a + place, Platform.getLong(stored, fromA + row))
        Platform.putLong(null, b + place, Platform.getLong(stored, fromB + row))
        Platform.putLong(null, c + place, Platform.getLong(stored, fromC + row))
        Platform.putLong(null, d + place, Platform.getLong(stored, fromD + row))
        k += 1
      }
      col += 4
    }
    while (col < columnFrom.length) {
      val address = column(col, low, length)
      val first = Block.BASE + columnFrom(col)
      var k = start
      while (k < stop) {
        copy(stored, first + from(k), null, address + to(k))
        k += 1
      }
      col += 1
    }
  }

  /** The address of some rows of a chosen column. */
  private def column(k: Int, low: Long, length: Long): Long =
    segment.address(columns(k) * height * itemsize + low, length)

  /** Read the elements of this rank of whole rows; the first row begins at `first`. */
  def getRows(row: Long, count: Int, into: Array[Byte], first: Int, rowBytes: Int): Unit = {
    val start = rows.count(row)
    val some = (rows.count(row + count) - start).toInt
    val width = columnFrom.length
    if (some == 0 || width == 0) return
    val end = first + (count - 1L) * rowBytes + columnFrom(width - 1) + itemsize
    if (first < 0 || rowBytes < 0 || end > into.length) {
      throw new IndexOutOfBoundsException(s"$count rows of $rowBytes bytes")
    }
    val to = new Array[Long](some)
    var found = 0
    var k = 0
    while (k < count) {
      if (rows.contains(row + k)) {
        to(found) = Block.BASE + first + k.toLong * rowBytes
        found += 1
      }
      k += 1
    }
    var col = 0
    while (itemsize == 8 && col + 4 <= width) {
      val a = column(col, 8 * start, 8L * some)
      val b = column(col + 1, 8 * start, 8L * some)
      val c = column(col + 2, 8 * start, 8L * some)
      val d = column(col + 3, 8 * start, 8L * some)
      val toA = columnFrom(col)
      val toB = columnFrom(col + 1)
      val toC = columnFrom(col + 2)
      val toD = columnFrom(col + 3)
      k = 0
      while (k < some) {
        val place = to(k)
        val from = 8L * k
        Platform.putLong(into, place + toA, Platform.getLong(null, a + from))
        Platform.putLong(into, place + toB, Platform.getLong(null, b + from))
        Platform.putLong(into, place + toC, Platform.getLong(null, c + from))
        Platform.putLong(into, place + toD, Platform.getLong(null, d + from))
        k += 1
      }
      col += 4
    }
    while (col < width) {
      var from = column(col, start * itemsize, some.toLong * itemsize)
      k = 0
      while (k < some) {
        copy(null, from, into, to(k) + columnFrom(col))
        from += itemsize
        k += 1
      }
      col += 1
    }
  }

  override def close(): Unit = if (segment != null) {
    segment.release()
    segment = null
  }
}
