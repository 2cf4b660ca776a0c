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
  private val GROUP = 8
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
    while (itemsize == 4 && k < count) {
      Platform.putInt(null, to, Platform.getInt(stored, from))
      from += step
      to += 4
      k += 1
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
    val from = new Array[Long](count)
    val place = new Array[Long](count)
    var some = 0
    var k = 0
    while (k < count) {
      place(some) = rows.position(numbers(k)) * itemsize
      from(some) = k.toLong * rowBytes
      if (place(some) >= 0) some += 1
      k += 1
    }
    var start = 0
    while (start < some) { // rows that have one address
      var low = place(start)
      var high = low
      var stop = start + 1
      while (stop < some &&
          math.max(high, place(stop)) - math.min(low, place(stop)) + itemsize <= Segment.MOST) {
        low = math.min(low, place(stop))
        high = math.max(high, place(stop))
        stop += 1
      }
      move(stored, from, place, start, stop, low, high + itemsize - low, write = true)
      start = stop
    }
    written += some.toLong * columnFrom.length
  }

  /** Read the elements of this rank of whole rows; the first row begins at `first`. */
  def getRows(row: Long, count: Int, into: Array[Byte], first: Int, rowBytes: Int): Unit = {
    val start = rows.count(row)
    val some = (rows.count(row + count) - start).toInt
    val to = new Array[Long](some)
    val place = new Array[Long](some)
    var found = 0
    var k = 0
    while (k < count) {
      if (rows.contains(row + k)) {
        to(found) = first + k.toLong * rowBytes
        place(found) = (start + found) * itemsize
        found += 1
      }
      k += 1
    }
    if (some > 0) {
      val length = some.toLong * itemsize
      move(into, to, place, 0, some, start * itemsize, length, write = false)
    }
  }

  /** Copy rows of an array to the block, or from it: row k of [start, stop) begins at byte `at(k)` of
    * the array, and at byte `place(k)` of each column, which is one of `length` bytes from `low` on.
    * Columns are copied in groups that fill a cache line of the row.
    */
  private def move(
      array: Array[Byte], at: Array[Long], place: Array[Long], start: Int, stop: Int, low: Long,
      length: Long, write: Boolean): Unit = {
    val width = if (columnFrom.isEmpty) 0 else columnFrom.last + itemsize
    var k = start
    while (k < stop) { // nothing below checks the array's bounds
      if (at(k) < 0 || at(k) + width > array.length) {
        throw new IndexOutOfBoundsException(s"a row at ${at(k)} of ${array.length} bytes")
      }
      k += 1
    }
    val address = new Array[Long](GROUP)
    val offset = new Array[Long](GROUP)
    for (col <- columnFrom.indices by GROUP) {
      val some = math.min(GROUP, columnFrom.length - col)
      for (j <- 0 until some) {
        address(j) = segment.address(columns(col + j) * height * itemsize + low, length) - low
        offset(j) = Block.BASE + columnFrom(col + j)
      }
      k = start
      while (k < stop) {
        val row = at(k)
        val there = place(k)
        var j = 0
        if (itemsize == 8 && write) { // a loop without a choice is quicker
          while (j < some) {
            Platform.putLong(null, address(j) + there, Platform.getLong(array, row + offset(j)))
            j += 1
          }
        } else if (itemsize == 8) {
          while (j < some) {
            Platform.putLong(array, row + offset(j), Platform.getLong(null, address(j) + there))
            j += 1
          }
        } else if (write) {
          while (j < some) {
            copy(array, row + offset(j), null, address(j) + there)
            j += 1
          }
        } else {
          while (j < some) {
            copy(null, address(j) + there, array, row + offset(j))
            j += 1
          }
        }
        k += 1
      }
    }
  }

  override def close(): Unit = if (segment != null) {
    segment.release()
    segment = null
  }
}
